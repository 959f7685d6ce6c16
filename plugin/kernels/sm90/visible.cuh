// Tiles of keys that a mask without a row per query hides whole. Nobody loads them or walks over
// them.
//
// Each of the first kMarkedTiles tiles has a mark that tells if a key of it may be seen, and one
// that tells if a key has a bias; the tiles after them count as both. A warp of the producer finds
// these marks for one tile of queries after the other, ahead of those that use them.
#pragma once

#include "kernels/common/bias.cuh"
#include "kernels/sm90/shared.cuh"

namespace flashonnx::sm90 {

// A number, or a parameter of the kernel, of which the compiler shall keep nothing in registers
// from one use to the next.
__device__ __forceinline__ int forgotten(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
__device__ __forceinline__ const Problem& forgotten(const Problem& p) {
  const Problem* x = &p;
  asm volatile("" : "+l"(x));
  return *x;
}

// The last visible tile from `tile` down to `first`, or one before `first`.
__device__ __forceinline__ int last_visible(const uint32_t* marks, int tile, int first) {
#pragma unroll 1
  while (tile >= first && tile < kMarkedTiles) {
    const uint32_t visible = marks[tile / 32] << (31 - tile % 32);
    if (visible != 0) return max(tile - __clz(visible), first - 1);
    tile = tile / 32 * 32 - 1;
  }
  return max(tile, first - 1);
}

// The first one from `tile` up to `last`, or one after `last`.
__device__ __forceinline__ int first_visible(const uint32_t* marks, int tile, int last) {
#pragma unroll 1
  while (tile <= last && tile < kMarkedTiles) {
    const uint32_t visible = marks[tile / 32] >> tile % 32;
    if (visible != 0) return min(tile + __ffs(visible) - 1, last + 1);
    tile = tile / 32 * 32 + 32;
  }
  return min(tile, last + 1);
}

__device__ __forceinline__ bool has_bias(const Marks& marks, int tile) {
  return tile >= kMarkedTiles || marks.biased[tile / 32] >> tile % 32 & 1;
}

// How many tiles down from a visible one are visible, and as it is biased or not.
__device__ __forceinline__ int visible_run(const Marks& marks, int tile, bool* biased) {
  *biased = true;
  if (tile >= kMarkedTiles) return tile - kMarkedTiles + 1;
  const uint32_t visible = marks.visible[tile / 32] << (31 - tile % 32);
  const uint32_t with = marks.biased[tile / 32] << (31 - tile % 32);
  *biased = with >> 31;
  return __clz(~(visible & (*biased ? with : ~with)));
}

// What was found, for one that uses it.
template <class C>
class Found {
 public:
  __device__ __forceinline__ explicit Found(const Shared<C>& shared) : shared_(shared) {}
  // The next tile of queries; see Item.
  __device__ __forceinline__ Item* next() const {
    barrier_wait(shared_.found_full(count_ % 2), count_ / 2 % 2);
    return shared_.found(count_ % 2);
  }
  __device__ __forceinline__ void done() { barrier_arrive(shared_.found_free(count_++ % 2)); }

 private:
  const Shared<C>& shared_;
  uint32_t count_ = 0;
};

// Fills in the marks for a tile of queries, by a warp: what its mask says of the keys up to the
// limit.
template <class C>
__device__ __forceinline__ void find_marks(const Problem& p, const Plan& plan, const Work& work,
                                           Marks* marks) {
  const int lane = threadIdx.x % 32;
  if (lane < kMarkedTiles / 32) marks->visible[lane] = 0, marks->biased[lane] = 0;
  __syncwarp();
  const char* const row = mask_element(p, plan, work.batch, work.head, 0, 0);
  const int limit = min(min(key_length_of(p, work.batch), p.key_limit), kMarkedTiles * C::kKeys);
  // Words of four bytes of which all keys are hidden, and what is not 0 in those with a bias.
  const int dtype = forgotten(p.mask_dtype), bytes = plan.mask_bytes;
  const bool half = dtype == FLASHONNX_FLOAT16 || dtype == FLASHONNX_BFLOAT16;
  const bool adds = half || dtype == FLASHONNX_FLOAT32;
  const uint32_t hidden = dtype == FLASHONNX_FLOAT16    ? 0xfc00fc00u
                          : dtype == FLASHONNX_BFLOAT16 ? 0xff80ff80u
                          : adds                        ? 0xff800000u
                                                        : 0u;
  const uint32_t size = half ? 0x7fff7fffu : 0x7fffffffu;
  const uint32_t ones = bytes == 1 ? 0x01010101u : bytes == 2 ? 0x00010001u : 1u;
  const auto seen = [&](uint32_t x) { return x ^ hidden; };
  const auto biased = [&](uint32_t x) { return adds ? x & size : (x - ones) & ~x & ones << 7; };
  const auto mark = [&](int key, uint32_t is_seen, uint32_t is_biased) {
    const int tile = key / C::kKeys;
    if (is_seen) atomicOr(marks->visible + tile / 32, 1u << tile % 32);
    if (is_biased) atomicOr(marks->biased + tile / 32, 1u << tile % 32);
  };
  // By 16 bytes, which are of one tile, where keys lie side by side.
  const bool vectors = plan.mask_step == bytes && reinterpret_cast<uintptr_t>(row) % 16 == 0;
  const int each = 16 / bytes;
  const int whole = vectors ? limit / each : 0;
#pragma unroll 1
  for (int at = lane; at < whole; at += 32) {
    const uint4 x = __ldg(reinterpret_cast<const uint4*>(row) + at);
    mark(at * each, seen(x.x) | seen(x.y) | seen(x.z) | seen(x.w),
         biased(x.x) | biased(x.y) | biased(x.z) | biased(x.w));
  }
#pragma unroll 1
  for (int key = whole * each + lane; key < limit; key += 32) {
    const uint32_t x = mask_bits(row + key * plan.mask_step, bytes) * ones;
    mark(key, seen(x), biased(x));
  }
}

}  // namespace flashonnx::sm90

// Tiles of keys that a mask without a row per query hides whole. Nobody loads them or walks over
// them.
//
// Each of the first kMarkedTiles tiles has a mark that tells if a key of it may be seen, and one
// that tells if a key has a bias; the tiles after them count as both. A warp of the producer finds
// these marks for one tile of queries after the other, ahead of those that use them.
#pragma once

#include "kernels/common/bias.cuh"
#include "kernels/sm90/packed_mask.h"
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

// How many tiles down from a visible one are visible, as far as a word of marks tells.
__device__ __forceinline__ int visible_run(const Marks& marks, int tile) {
  if (tile >= kMarkedTiles) return tile - kMarkedTiles + 1;
  return __clz(~(marks.visible[tile / 32] << (31 - tile % 32)));
}
// As well, and as it is biased or not.
__device__ __forceinline__ int visible_run(const Marks& marks, int tile, bool* biased) {
  *biased = true;
  if (tile >= kMarkedTiles) return tile - kMarkedTiles + 1;
  const uint32_t visible = marks.visible[tile / 32] << (31 - tile % 32);
  const uint32_t with = marks.biased[tile / 32] << (31 - tile % 32);
  *biased = with >> 31;
  return __clz(~(visible & (*biased ? with : ~with)));
}

// Whether keys of a visible tile are masked.
__device__ __forceinline__ bool is_biased(const Marks& marks, int tile) {
  return tile >= kMarkedTiles || (marks.biased[tile / 32] >> tile % 32 & 1) != 0;
}

// Of a tile in a row of them; with weights each 16 queries have marks of their own.
template <class C>
__device__ __forceinline__ int marks_of(const uint8_t* row, int tile) {
  if (!C::kWeights) return row[tile];
  const uint4 x = reinterpret_cast<const uint4*>(row)[tile];
  uint32_t any = x.x | x.y | x.z | x.w;
  any |= any >> 16;
  return (any | any >> 8) & 0xff;
}

// Fills in the marks of a tile of queries up to the last tile that its span has, by a warp. Keys
// with the least biases count as hidden where each of the queries sees others: their P is 0.
// Returns whether all visible tiles are calm.
template <class C>
__device__ __forceinline__ bool copy_marks(const Problem& p, const PackedMask& packed,
                                           const Work& work, const Span& span, Marks* marks) {
  const int lane = threadIdx.x % 32;
  const uint8_t* const from = packed.marks + int64_t{packed.row_of(p, work, C::kQueries)} *
                                                 packed.key_tiles *
                                                 (C::kWeights ? kWeightMarks : 1);
  if (C::kWeights && (marks_of<C>(from, span.last_tile) & kLevel) && lane == 0)
    marks->row.level = 1;
  const int last_query = min(work.first_query + C::kQueries, p.q_length) - 1;
  const int first_whole = (span.range.lower(last_query) + C::kKeys - 1) / C::kKeys;
  const int end_whole = span.range.upper(work.first_query) / C::kKeys;
  const int end = min(span.last_tile + 1, kMarkedTiles);
  bool ordinary = false, calm = true;
#pragma unroll 1
  for (int tile = first_whole + lane; tile < min(end, end_whole); tile += 32)
    ordinary |= (marks_of<C>(from, tile) & kOrdinary) != 0;
  ordinary = __any_sync(0xffffffffu, ordinary);
#pragma unroll 1
  for (int i = span.first_tile / 32; 32 * i < end; ++i) {
    const int mark = 32 * i + lane < end ? marks_of<C>(from, 32 * i + lane) : 0;
    const bool is_seen = (mark & kSeen) && !(ordinary && (mark & kLeast));
    const uint32_t seen = __ballot_sync(0xffffffffu, is_seen);
    const uint32_t masked = __ballot_sync(0xffffffffu, mark & kMasked);
    if (lane == 0) marks->visible[i] = seen, marks->biased[i] = masked;
    calm &= !is_seen || (mark & kCalm);
  }
  return __all_sync(0xffffffffu, calm) != 0 && span.last_tile < kMarkedTiles;
}

// Says in `marks` whether tiles from `first` on to the one before `last` are alike. By a warp.
__device__ __forceinline__ void compare_marks(Marks* marks, int first, int last) {
  const int lane = threadIdx.x % 32;
  const int begin = max(first - 32 * lane, 0), end = min(last - 32 * lane, 32);
  const bool any = begin < end && lane < kMarkedTiles / 32;
  const uint32_t tiles = any ? (~0u >> (32 - (end - begin))) << begin : 0;
  const uint32_t visible = any ? marks->visible[lane] : 0, biased = any ? marks->biased[lane] : 0;
  const bool all_visible = __all_sync(0xffffffffu, (tiles & ~visible) == 0);
  const bool all_biased = __all_sync(0xffffffffu, (tiles & ~biased) == 0);
  const bool none_biased = __all_sync(0xffffffffu, (tiles & biased) == 0);
  if (lane > 0) return;
  marks->row.uniform = all_visible && (all_biased || none_biased) && last < kMarkedTiles;
  marks->row.biased = !none_biased;
}

// Whether all queries of a tile see the same keys of this tile of keys, as structure has it.
template <class C>
__device__ __forceinline__ bool sees_alike(const Problem& p, const Work& work,
                                           const KeyRange& range, int tile) {
  const int last_query = min(work.first_query + C::kQueries, p.q_length) - 1;
  return range.lower(last_query) <= tile * C::kKeys &&
         range.upper(work.first_query) >= min((tile + 1) * C::kKeys, p.key_limit);
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

}  // namespace flashonnx::sm90

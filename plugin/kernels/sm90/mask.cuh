// What stands between Q K^T and the softmax on some tiles: soft cap, biases of keys and structural
// bounds.
//
// The bounds select -infinity, whatever a score was. A mask's -infinity is added, which costs less
// and comes to the same unless the masked score is infinite or NaN: careful.cuh is about that.
#pragma once

#include "kernels/common/bias.cuh"
#include "kernels/sm90/softmax.cuh"

namespace flashonnx::sm90 {

// scores = factor * scores + weight * bias of each key.
template <class C>
__device__ __forceinline__ void add_key_biases(const Lane& lane, float factor, float weight,
                                               const float* biases, float (&scores)[C::kScores]) {
#pragma unroll
  for (int n = 0; n < C::kScores / 4; ++n) {
    float2 bias = *reinterpret_cast<const float2*>(biases + 8 * n + 2 * lane.quad);
    bias.x *= weight, bias.y *= weight;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      scores[4 * n + 2 * h] = fmaf(scores[4 * n + 2 * h], factor, bias.x);
      scores[4 * n + 2 * h + 1] = fmaf(scores[4 * n + 2 * h + 1], factor, bias.y);
    }
  }
}

// The soft cap.
template <class C>
__device__ __forceinline__ void cap_scores(float cap_in, float cap, float (&scores)[C::kScores]) {
#pragma unroll
  for (int i = 0; i < C::kScores; ++i) {
    scores[i] = cap * tanh_approximate(cap_in * scores[i]);
    // One after the other: side by side they would want more registers than there are.
    if (i % 8 == 7) fence_registers(scores);
  }
}

// The lower and upper half of a pair, as float32.
template <class T>
__device__ __forceinline__ float2 unpack(uint32_t pair) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  } else {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
  }
}

// Reads the warp's rows of a mask of Q's type, from a tile in shared memory: boxes of 64 keys with
// swizzled rows of 128 bytes. `use` is called with i and the pair for scores 2 i and 2 i + 1.
template <class C, class Use>
__device__ __forceinline__ void read_biases(const Lane& lane, uint32_t tile, const Use& use) {
  const int row = (lane.group * 64 + lane.warp * 16 + lane.lane % 16);
  const uint32_t first = tile + row * 128 + (lane.lane / 16 ^ row % 8) * 16;
#pragma unroll
  for (int n = 0; n < C::kScores / 4; n += 2) {
    uint32_t x[4];
    load_matrices(x, (first ^ n % 8 * 16) + n / 8 * C::kQueries * 128);
#pragma unroll
    for (int i = 0; i < 4; ++i) use(2 * n + i, x[i]);
  }
}

// As well of a mask of bytes: one box, with swizzled rows of kKeys bytes.
template <class C, class Use>
__device__ __forceinline__ void read_bytes(const Lane& lane, uint32_t tile, const Use& use) {
  constexpr int kChunks = C::kKeys / 16;
  static_assert(kChunks == 8 || kChunks == 4);
  const int row = (lane.first_row());
  const int swizzle = kChunks == 8 ? row % 8 : row / 2 % 4;
  const uint32_t first = tile + row * C::kKeys + swizzle * 16 + 2 * lane.quad;
#pragma unroll
  for (int i = 0; i < C::kScores / 2; ++i) {
    const uint32_t at = (first ^ i / 4 * 16) + i / 2 % 2 * 8 + i % 2 * 8 * C::kKeys;
    uint16_t pair;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(pair) : "r"(at));
    use(i, uint32_t{pair});
  }
}

// Two scores and their biases.
template <class T>
__device__ __forceinline__ void add_biases(float scale, uint32_t pair, float* score) {
  const float2 bias = unpack<T>(pair);
  score[0] = fmaf(score[0], scale, bias.x);
  score[1] = fmaf(score[1], scale, bias.y);
}
// -infinity where a byte is 0.
__device__ __forceinline__ void select_by_bytes(uint32_t pair, float* score) {
  if ((pair & 0xff) == 0) score[0] = -INFINITY;
  if ((pair & 0xff00) == 0) score[1] = -INFINITY;
}

// Where it is written, long before it is needed: the assembler would put it off.
__device__ __forceinline__ uint2 load_early(const float* from) {
  uint2 x = {};
  asm volatile("ld.volatile.global.b32 %0, [%1];" : "=r"(x.x) : "l"(from) : "memory");
  return x;
}
__device__ __forceinline__ uint2 load_early(const unsigned char* from) {
  uint2 x;
  asm volatile("ld.volatile.global.v2.b32 {%0, %1}, [%2];"
               : "=r"(x.x), "=r"(x.y)
               : "l"(from)
               : "memory");
  return x;
}
// -infinity where the score's bit is 0.
template <class C>
__device__ __forceinline__ void hide_by_bits(const uint2& bits, float (&scores)[C::kScores]) {
#pragma unroll
  for (int i = 0; i < C::kScores; ++i) {
    if (!((i < 32 ? bits.x : bits.y) & 1u << i % 32)) scores[i] = -INFINITY;
  }
}

// Which of a thread's scores of a row are of keys before `end`, counted from the thread's first
// key: bit 2 n + e is key 8 n + e.
__device__ __forceinline__ uint32_t bits_before(int end) {
  const int x = max(end, 0);
  const int count = x / 8 * 2 + min(x % 8, 2);
  return ~__funnelshift_lc(0u, ~0u, count);
}

// By bits, as one instruction makes seven predicates of them. `present`: of the tile's keys, which
// may be seen at all, laid out as those bits.
template <class C>
__device__ __forceinline__ void apply_bounds(const KeyRange& range, const Lane& lane,
                                             int first_query, int first_key, uint32_t present,
                                             float (&scores)[C::kScores]) {
  static_assert(C::kScores / 2 <= 32);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int query = (first_query + lane.first_row()) + 8 * h;
    const int first = first_key + 2 * lane.quad;
    const uint32_t seen = bits_before(range.upper(query) - first) &
                          ~bits_before(range.lower(query) - first) & present;
#pragma unroll
    for (int n = 0; n < C::kScores / 4; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (!(seen >> (2 * n + e) & 1)) scores[4 * n + 2 * h + e] = -INFINITY;
      }
    }
  }
}

}  // namespace flashonnx::sm90

// Biases of the projections that made Q and V. That of K adds the same to all scores of
// a row, which softmax does not see; that of V adds itself to a row of the output, whose weights
// sum up to 1.
#pragma once

#include "kernels/sm90/softmax.cuh"

namespace flashonnx::sm90 {

// Whether kernels of the tiling see to them.
template <class C>
constexpr bool kAddsProjectionBias = !C::kMarks && !C::kGathered;

// The sum of two vectors of eight elements, rounded to them.
template <class T>
__device__ __forceinline__ uint4 add_elements(uint4 x, uint4 y) {
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  Pair* const sums = reinterpret_cast<Pair*>(&x);
  const Pair* const others = reinterpret_cast<const Pair*>(&y);
#pragma unroll
  for (int i = 0; i < 4; ++i) sums[i] = __hadd2(sums[i], others[i]);
  return x;
}

// Adds the head's bias to a warpgroup's tile of queries, in shared memory.
template <class T, class C>
__device__ __forceinline__ void add_query_bias(const Problem& p, int head, uint32_t queries) {
  constexpr int kChunks = C::kBoxRow / 16;  // of a row of a box
  const int place = threadIdx.x % kChunks, first = threadIdx.x % 128 / kChunks;
  const int feature = 8 * (place ^ (kChunks == 8 ? first % 8 : first / 2 % 4));
  const T* const bias = static_cast<const T*>(p.q_bias.data) + head * p.q_bias.head + feature;
#pragma unroll
  for (int box = 0; box < C::kBoxes; ++box) {
    if (box * C::kBox + feature >= p.head_dim) continue;
    const uint4 add = __ldg(reinterpret_cast<const uint4*>(bias + box * C::kBox));
#pragma unroll
    for (int row = 0; row < 64; row += 128 / kChunks) {
      const uint32_t at = queries + (box * C::kQueries + first + row) * C::kBoxRow + place * 16;
      store_chunk(at, add_elements<T>(load_chunk(at), add));
    }
  }
}

// Adds the head's bias to sums of P V, as often as P sums up to; not to those of rows without keys.
template <class T, class C>
__device__ __forceinline__ void add_value_bias(const Problem& p, int kv_head, int quad,
                                               const float (&sums)[2],
                                               float (&output)[C::kOutputs]) {
  const T* const bias = static_cast<const T*>(p.v_bias.data) + kv_head * p.v_bias.head + 2 * quad;
#pragma unroll
  for (int n = 0; n < C::kValueDim / 8; ++n) {
    if (8 * n >= p.value_dim) break;
    const uint32_t pair = __ldg(reinterpret_cast<const uint32_t*>(bias + 8 * n));
    const float low = to_float(reinterpret_cast<const T*>(&pair)[0]);
    const float high = to_float(reinterpret_cast<const T*>(&pair)[1]);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      output[4 * n + 2 * h] = fmaf(sums[h], low, output[4 * n + 2 * h]);
      output[4 * n + 2 * h + 1] = fmaf(sums[h], high, output[4 * n + 2 * h + 1]);
    }
  }
}

// As well of features lane, lane + 32, ... of a row: of Q, and of V times `times`.
template <class T, class C>
__device__ __forceinline__ void add_query_bias(const Problem& p, int head, int lane,
                                               float (&row)[C::kDim / 32]) {
  if (!kAddsProjectionBias<C> || !p.q_bias.data) return;
  const T* const bias = static_cast<const T*>(p.q_bias.data) + head * p.q_bias.head;
#pragma unroll
  for (int i = 0; i < C::kDim / 32; ++i) {
    const int feature = 32 * i + lane;
    if (feature < p.head_dim) row[i] = to_float(T(row[i] + to_float(bias[feature])));
  }
}
template <class T, class C>
__device__ __forceinline__ void add_value_bias(const Problem& p, int kv_head, int lane, float times,
                                               float (&row)[C::kDim / 32]) {
  if (!kAddsProjectionBias<C> || !p.v_bias.data) return;
  const T* const bias = static_cast<const T*>(p.v_bias.data) + kv_head * p.v_bias.head;
#pragma unroll
  for (int i = 0; i < C::kDim / 32; ++i) {
    const int feature = 32 * i + lane;
    if (feature < p.value_dim) row[i] = fmaf(times, to_float(bias[feature]), row[i]);
  }
}

}  // namespace flashonnx::sm90

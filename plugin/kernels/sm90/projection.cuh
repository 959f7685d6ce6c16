// Biases of the projections that made Q and V. That of K adds the same to all scores of a row,
// which softmax does not see; that of V adds itself to a row of the output, whose weights sum up
// to 1.
#pragma once

#include "kernels/sm90/shared.cuh"
#include "kernels/sm90/softmax.cuh"

namespace flashonnx::sm90 {

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

// Adds a head's bias to a tile of queries in shared memory, by two warps.
template <class T, class C>
__device__ __forceinline__ void add_to_queries(const T* bias, int dim, int thread,
                                               uint32_t queries) {
  constexpr int kChunks = C::kBoxRow / 16, kRows = 64 / kChunks;  // of a box, at a time
  const int place = thread % kChunks, first = thread / kChunks;
  const int feature = 8 * (place ^ (kChunks == 8 ? first % 8 : first / 2 % 4));
#pragma unroll 1
  for (int box = 0; box < C::kBoxes; ++box) {
    if (box * C::kBox + feature >= dim) continue;
    const uint4 add = __ldg(reinterpret_cast<const uint4*>(bias + box * C::kBox + feature));
    uint32_t at = queries + (box * C::kQueries + first) * C::kBoxRow + place * 16;
#pragma unroll 1
    for (int row = 0; row < C::kQueries; row += 4 * kRows, at += 4 * kRows * C::kBoxRow) {
      uint4 x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = load_shared(at + i * kRows * C::kBoxRow);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        store_shared(at + i * kRows * C::kBoxRow, add_elements<T>(x[i], add));
    }
  }
}

// Warps 1 and 2 add the bias to tiles of queries that have landed, and hand them on to consumers.
template <class T, class C>
__device__ __forceinline__ void add_query_biases(const Problem& p, const Shared<C>& shared) {
  const int thread = threadIdx.x - 32;
  Ring<C::kQueryStages> queries;
  bool more = true;
  while (more) {
    barrier_wait(shared.q_landed(queries.stage), queries.round);
    const Work& work = shared.item(queries.stage)->work;
    more = work.batch >= 0;
    if (more) {
      // The epilogue's comes near meanwhile.
      if (64 * thread < C::kValueDim)
        prefetch_line(static_cast<const T*>(p.v_bias.data) + work.kv_head * p.v_bias.head +
                      64 * thread);
      add_to_queries<T, C>(static_cast<const T*>(p.q_bias.data) + work.head * p.q_bias.head,
                           p.head_dim, thread, shared.q(queries.stage));
      fence_async();
    }
    named_sync(1 + 2 * C::kGroups, 64);
    if (thread == 0) barrier_arrive(shared.q_full(queries.stage));
    queries.advance();
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
  const T* const bias = static_cast<const T*>(p.v_bias.data) + kv_head * p.v_bias.head;
#pragma unroll
  for (int i = 0; i < C::kDim / 32; ++i) {
    const int feature = 32 * i + lane;
    if (feature < p.value_dim) row[i] = fmaf(times, to_float(bias[feature]), row[i]);
  }
}

}  // namespace flashonnx::sm90

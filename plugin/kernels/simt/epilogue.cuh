// From sums to outputs: sinks, rows without keys, the log of the sum, and the stores.
#pragma once

#include <cmath>

#include "flashonnx/attention.h"
#include "kernels/simt/load.cuh"
#include "kernels/simt/problem.h"
#include "kernels/simt/softmax.cuh"

namespace flashonnx::simt {

// Each warp's sums of V over its share of the first `length` keys, in partial[warp][feature].
template <class T, class C>
__device__ __forceinline__ void sum_values(const T* v, int64_t stride, int length, int features,
                                           Widen widen, float* partial) {
  constexpr int kWarps = C::kThreads / 32;
  const int warp = threadIdx.x / 32;
  for (int feature = threadIdx.x % 32; feature < features; feature += 32) {
    float sum = 0.f;
#pragma unroll 4
    for (int key = warp; key < length; key += kWarps) sum += widen(v[key * stride + feature]);
    partial[warp * C::kHeadDim + feature] = sum;
  }
}

// Gives rows without keys the mean of V. Every thread of the block calls this; `partial` is free
// shared memory.
template <class T, class C>
__device__ __forceinline__ void mean_of_values(const Problem& p, const Place& place,
                                               const Lane<C>& lane, int last_query, float* partial,
                                               RowState<C>& state) {
  constexpr int kWarps = C::kThreads / 32;
  static_assert(kWarps * C::kHeadDim <= 2 * C::kChunk, "the partial sums fit in the slots");
  bool empty = false;
#pragma unroll
  for (int i = 0; i < C::kThreadRows; ++i) {
    empty |= state.sum[i] == 0.f && place.first_query + lane.query(i) <= last_query;
  }
  const int length = key_length_of(p, place.batch);
  if (!__syncthreads_or(empty) || length == 0)
    return;  // the barrier also says that the slots are free
  sum_values<T, C>(
      static_cast<const T*>(p.v.data) + place.batch * p.v.batch + place.kv_head * p.v.head, p.v.row,
      length, p.value_dim, Widen{p.bfloat16}, partial);
  __syncthreads();
#pragma unroll
  for (int c = 0; c < C::kThreadColumns; ++c) {
    const int feature = lane.feature(c / 4) + c % 4;
    float sum = 0.f;
    for (int w = 0; w < kWarps && feature < p.value_dim; ++w)
      sum += partial[w * C::kHeadDim + feature];
#pragma unroll
    for (int i = 0; i < C::kThreadRows; ++i) {
      if (state.sum[i] == 0.f) state.output[i][c] = sum / static_cast<float>(length);
    }
  }
}

template <class Out, class C>
__device__ __forceinline__ void store_rows(const Problem& p, const Place& place,
                                           const Lane<C>& lane, int token, int last_query,
                                           const RowState<C>& state) {
  struct alignas(4 * sizeof(Out)) Four {
    Out at[4];
  };
  Out* const base = static_cast<Out*>(p.o.data) + place.split * p.o_split +
                    place.batch * p.o.batch + place.head * p.o.head;
#pragma unroll
  for (int i = 0; i < C::kThreadRows; ++i) {
    const int query = place.first_query + lane.query(i);
    if (query > last_query) continue;
#pragma unroll
    for (int c = 0; c < C::kThreadColumns; c += 4) {
      const int feature = lane.feature(c / 4), valid = p.value_dim - feature;
      Out* const to = base + (token + query) * p.o.row + feature;
      Four four;
#pragma unroll
      for (int e = 0; e < 4; ++e) four.at[e] = from_float<Out>(state.output[i][c + e]);
      if (p.o_vectors && valid >= 4) {
        *reinterpret_cast<Four*>(to) = four;
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (e < valid) to[e] = four.at[e];
        }
      }
    }
  }
}

// Divides, and writes the tile's outputs. `scratch`: 2 chunks of shared memory that no copy is on
// its way to. state.sum is complete. `token`: the row of the sequence's first query.
template <class T, class C, bool kGathered>
__device__ __forceinline__ void finish_rows(const Problem& p, const Place& place,
                                            const Lane<C>& lane, int token, int last_query,
                                            float* scratch, RowState<C>& state) {
  const float sink = p.sinks ? p.sinks[place.head * p.sinks_stride] : -INFINITY;
  float* const lse = static_cast<float*>(p.lse.data);
#pragma unroll
  for (int i = 0; i < C::kThreadRows; ++i) {
    const int query = place.first_query + lane.query(i);
    const float sum = state.sum[i], maximum = state.maximum[i];
    if (lse && query <= last_query && lane.warp_column == 0 && lane.column == 0) {
      const int64_t at = place.split * p.lse_split + place.batch * p.lse.batch +
                         place.head * p.lse.head + (token + query) * p.lse.row;
      if (p.sums) {
        lse[at] = maximum, p.sums[at] = sum;
      } else {
        lse[at] = sum == 0.f ? -INFINITY : maximum + logf(sum);
      }
    }
    float factor = 1.f / sum;
    if (p.sinks) {
      const float top = fmaxf(maximum, sink);
      factor = exp_approximate(maximum - top);
      factor /= sum * factor + exp_approximate(sink - top);
    }
#pragma unroll
    for (int c = 0; c < C::kThreadColumns; ++c)
      state.output[i][c] = sum == 0.f ? 0.f : state.output[i][c] * factor;
  }
  if (!kGathered && p.empty_row_mean && !p.sinks)
    mean_of_values<T, C>(p, place, lane, last_query, scratch, state);

  switch (p.output_dtype) {
    case FLASHONNX_FLOAT32:
      return store_rows<float>(p, place, lane, token, last_query, state);
    case FLASHONNX_FLOAT16:
      return store_rows<__half>(p, place, lane, token, last_query, state);
    case FLASHONNX_BFLOAT16:
      return store_rows<__nv_bfloat16>(p, place, lane, token, last_query, state);
  }
}

}  // namespace flashonnx::simt

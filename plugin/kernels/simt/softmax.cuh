// The online softmax of a lane's rows, in natural units: exp(x) = 2^(x log2 e), after the row's
// maximum is taken off.
#pragma once

#include <cmath>

#include "kernels/simt/lane.cuh"

namespace flashonnx::simt {

__device__ __forceinline__ float exp_approximate(float x) {
  return exp2_approximate(x * 1.4426950408889634f);
}

template <class C>
struct RowState {
  float output[C::kThreadRows][C::kThreadColumns];  // sum of exp(score - maximum) V
  float maximum[C::kThreadRows];                    // -infinity: no key yet
  float sum[C::kThreadRows];                        // of this lane's keys only, until reduce_sums

  __device__ __forceinline__ RowState() {
#pragma unroll
    for (int i = 0; i < C::kThreadRows; ++i) {
      maximum[i] = -INFINITY;
      sum[i] = 0.f;
#pragma unroll
      for (int c = 0; c < C::kThreadColumns; ++c) output[i][c] = 0.f;
    }
  }
};

// The probability of a masked key: no key at all, while one that underflows to 0 still meets its V.
constexpr float kMasked = -0.f;

// Makes probabilities of the scores, relative to the rows' new maxima, and rescales what was summed
// before. Every thread of the block calls this; only `active` warps have rows in the tile.
template <class C>
__device__ __forceinline__ void softmax(const Lane<C>& lane, bool active, bool masked,
                                        float* statistics,
                                        float (&scores)[C::kThreadRows][C::kThreadKeys],
                                        RowState<C>& state) {
  float maximum[C::kThreadRows];
  if (active) {
#pragma unroll
    for (int i = 0; i < C::kThreadRows; ++i) {
      float x = scores[i][0];
#pragma unroll
      for (int j = 1; j < C::kThreadKeys; ++j) x = fmaxf(x, scores[i][j]);
      maximum[i] = reduce_row(x, [](float a, float b) { return fmaxf(a, b); });
    }
  }
  if constexpr (C::kColumnWarps > 1) {
    if (active && lane.column == 0) {
#pragma unroll
      for (int i = 0; i < C::kThreadRows; ++i)
        statistics[lane.warp_column * C::kBlockRows + lane.query(i)] = maximum[i];
    }
    __syncthreads();
    if (active) {
#pragma unroll
      for (int i = 0; i < C::kThreadRows; ++i) {
        for (int w = 0; w < C::kColumnWarps; ++w) {
          maximum[i] = fmaxf(maximum[i], statistics[w * C::kBlockRows + lane.query(i)]);
        }
      }
    }
  }
  if (!active) return;
#pragma unroll
  for (int i = 0; i < C::kThreadRows; ++i) {
    const float next = fmaxf(state.maximum[i], maximum[i]);
    const float base = next == -INFINITY
                           ? 0.f
                           : next;  // a row without keys: exp(-infinity - 0) = 0, and NaN stays NaN
    const float keep = exp_approximate(state.maximum[i] - base);
    state.maximum[i] = next;
    state.sum[i] *= keep;
#pragma unroll
    for (int c = 0; c < C::kThreadColumns; ++c) state.output[i][c] *= keep;
#pragma unroll
    for (int j = 0; j < C::kThreadKeys; ++j) {
      const float probability = exp_approximate(scores[i][j] - base);
      scores[i][j] = masked && scores[i][j] == -INFINITY ? kMasked : probability;
      state.sum[i] += scores[i][j];
    }
  }
}

// The rows' sums over all their lanes and warps, in every lane. Every thread of the block calls
// this.
template <class C>
__device__ __forceinline__ void reduce_sums(const Lane<C>& lane, float* statistics,
                                            RowState<C>& state) {
#pragma unroll
  for (int i = 0; i < C::kThreadRows; ++i)
    state.sum[i] = reduce_row(state.sum[i], [](float a, float b) { return a + b; });
  if constexpr (C::kColumnWarps > 1) {
    if (lane.column == 0) {
#pragma unroll
      for (int i = 0; i < C::kThreadRows; ++i)
        statistics[lane.warp_column * C::kBlockRows + lane.query(i)] = state.sum[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < C::kThreadRows; ++i) {
      state.sum[i] = 0.f;
      for (int w = 0; w < C::kColumnWarps; ++w)
        state.sum[i] += statistics[w * C::kBlockRows + lane.query(i)];
    }
  }
}

}  // namespace flashonnx::simt

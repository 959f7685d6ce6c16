// The two matrix products, out of shared memory into a lane's registers. All the arithmetic of the
// kernel is here.
#pragma once

#include "kernels/simt/load.cuh"
#include "kernels/simt/softmax.cuh"

namespace flashonnx::simt {

__device__ __forceinline__ float element(const float4& x, int i) {
  return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}

// scores += Q K^T over the first `features` (a multiple of 4) of a chunk, for the lane's first
// kRows queries. `queries`: the chunk's part of Q; `keys`: its slot.
template <class C, int kRows>
__device__ __forceinline__ void add_scores(const Lane<C>& lane, const float* queries,
                                           const float* keys, int features,
                                           float (&scores)[C::kThreadRows][C::kThreadKeys]) {
#pragma unroll 2
  for (int feature = 0; feature < features; feature += 4) {
    float4 q[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      q[i] = *reinterpret_cast<const float4*>(queries + query_offset<C>(lane.query(i), feature));
    }
#pragma unroll
    for (int j = 0; j < C::kThreadKeys; ++j) {
      const float4 k =
          *reinterpret_cast<const float4*>(keys + KeyChunk<C>::offset(lane.key(j), feature));
#pragma unroll
      for (int e = 0; e < 4; ++e) {
#pragma unroll
        for (int i = 0; i < kRows; ++i)
          scores[i][j] = fmaf(element(q[i], e), element(k, e), scores[i][j]);
      }
    }
  }
}

// output += P V over the kValueKeys keys of a chunk that starts at `first_key` of the tile, for the
// lane's first kRows queries. kCareful: some V is not finite, so masked keys are left out instead
// of multiplied.
template <class C, int kRows, bool kCareful>
__device__ __forceinline__ void add_values(const Lane<C>& lane, const float* probabilities,
                                           const float* values, int first_key,
                                           float (&output)[C::kThreadRows][C::kThreadColumns]) {
#pragma unroll(kCareful ? 1 : 2)
  for (int key = 0; key < C::kValueKeys; key += 4) {
    float4 p[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      p[i] = *reinterpret_cast<const float4*>(
          probabilities + probability_offset<C>(lane.query(i), first_key + key));
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int c = 0; c < C::kThreadColumns; c += 4) {
        const float4 v = *reinterpret_cast<const float4*>(
            values + ValueChunk<C>::offset(key + n, lane.feature(c / 4)));
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const float weight = element(p[i], n);
          if (kCareful && float_to_bits(weight) == float_to_bits(kMasked)) continue;
#pragma unroll
          for (int e = 0; e < 4; ++e)
            output[i][c + e] = fmaf(weight, element(v, e), output[i][c + e]);
        }
      }
    }
  }
}

}  // namespace flashonnx::simt

// What stands between Q K^T and the softmax on some tiles: soft cap, biases of keys and structural
// bounds.
//
// The bounds select -infinity, whatever a score was. A mask's -infinity is added, which costs less
// and comes to the same unless the masked score is infinite or NaN: careful.cuh is about that.
#pragma once

#include "kernels/common/bias.cuh"
#include "kernels/sm90/softmax.cuh"

namespace flashonnx::sm90 {

// scores = factor * scores + bias of each key.
template <class C>
__device__ __forceinline__ void add_key_biases(const Lane& lane, float factor, const float* biases,
                                               float (&scores)[C::kScores]) {
#pragma unroll
  for (int n = 0; n < C::kScores / 4; ++n) {
    const float2 bias = *reinterpret_cast<const float2*>(biases + 8 * n + 2 * lane.quad);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      scores[4 * n + 2 * h] = fmaf(scores[4 * n + 2 * h], factor, bias.x);
      scores[4 * n + 2 * h + 1] = fmaf(scores[4 * n + 2 * h + 1], factor, bias.y);
    }
  }
}

// The soft cap, or only the scale. After it the scores' factor is 1.
template <class C>
__device__ __forceinline__ void cap_scores(const Problem& p, const Plan& plan,
                                           float (&scores)[C::kScores]) {
  if (p.softcap > 0.f) {
#pragma unroll
    for (int i = 0; i < C::kScores; ++i) {
      scores[i] = plan.cap_out * tanh_approximate(plan.cap_in * scores[i]);
      // One after the other: side by side they would want more registers than there are.
      if (i % 8 == 7) fence_registers(scores);
    }
  } else {
#pragma unroll
    for (int i = 0; i < C::kScores; ++i) scores[i] *= plan.factor;
  }
}

template <class C>
__device__ __forceinline__ void apply_bounds(const KeyRange& range, const Lane& lane,
                                             int first_query, int first_key,
                                             float (&scores)[C::kScores]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int query = first_query + lane.first_row() + 8 * h;
    const int lower = range.lower(query);
    const unsigned seen = max(range.upper(query) - lower, 0);
    const int first = first_key + 2 * lane.quad - lower;
#pragma unroll
    for (int n = 0; n < C::kScores / 4; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (static_cast<unsigned>(first + 8 * n + e) >= seen) scores[4 * n + 2 * h + e] = -INFINITY;
      }
    }
  }
}

}  // namespace flashonnx::sm90

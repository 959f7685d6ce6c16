// The online softmax of one row.
#pragma once

#include "simd.h"

namespace flashonnx::cpu::FLASHONNX_CPU_ISA {

inline void apply_softcap(float* scores, float cap, int begin, int end) {
  const float inverse = 1.0f / cap;
  for (int n = begin; n < end; n += kWidth) {
    store(scores + n, tanh(load(scores + n) * inverse) * cap);
  }
}

// e^x of one number, as every row of a vector sees it.
inline float exp_nonpositive(float x) { return exp_nonpositive(broadcast(x))[0]; }

// Turns scores [begin, end) into weights e^(score - maximum), updates the row's running maximum and sum and returns the factor that
// brings earlier weights to the new maximum. With kKeep, a weight is 0 only where the score is -inf: a masked key is told from one
// whose weight merely underflows.
template <bool kKeep>
float update_row(float* scores, int begin, int end, float& maximum, float& sum) {
  Vec largest = broadcast(maximum);
  for (int n = begin; n < end; n += kWidth) largest = max(load(scores + n), largest);
  const float previous = maximum;
  maximum = max_lanes(largest);
  const Vec base = broadcast(maximum == -kInfinity ? 0.0f : maximum);  // -inf - -inf would be NaN
  Vec total{};
  for (int n = begin; n < end; n += kWidth) {
    const Vec score = load(scores + n);
    Vec weight = exp_nonpositive(score - base);
    if (kKeep) weight = (weight == 0.0f) & (score != -kInfinity) ? Vec{} + FLT_TRUE_MIN : weight;
    total += weight;
    store(scores + n, weight);
  }
  const float rescale = previous == maximum ? 1.0f : exp_nonpositive(previous - base[0]);
  sum = sum * rescale + sum_lanes(total);
  return rescale;
}

}  // namespace flashonnx::cpu::FLASHONNX_CPU_ISA

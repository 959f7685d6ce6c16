// The steps of the online softmax on one row of scores, columns [begin, end) of a tile; whole
// vectors are read and written.
#pragma once

#include "simd.h"
#include "source.h"

namespace flashonnx::cpu::FLASHONNX_CPU_ISA {

inline void apply_softcap(float* scores, float cap, int begin, int end) {
  const float inverse = 1.0f / cap;
  for (int n = begin; n < end; n += kWidth) {
    store(scores + n, tanh(load(scores + n) * inverse) * cap);
  }
}

// Adds biases and returns the largest of the sums and `largest`. Only a bias of exactly -inf masks:
// it wins over whatever stands in the score, and a sum of finite numbers that overflows stays
// finite, so that a row of finfo.min everywhere still has keys.
inline Vec add_biases(float* scores, const float* biases, int begin, int end, Vec largest) {
  for (int n = begin; n < end; n += kWidth) {
    const Vec bias = load_upto(biases + n, end - n);
    Vec sum = load(scores + n) + bias;
    sum = sum < -FLT_MAX ? Vec{} - FLT_MAX : sum;
    sum = bias == -kInfinity ? Vec{} - kInfinity : sum;
    largest = max(sum, largest);
    store(scores + n, sum);
  }
  return largest;
}

inline Vec find_largest(const float* scores, int begin, int end, Vec largest) {
  for (int n = begin; n < end; n += kWidth) largest = max(load(scores + n), largest);
  return largest;
}

// Masks columns outside of [from, to), up to the end of the last vector. Answers whether there were
// any.
inline bool mask_outside(float* scores, int begin, int end, int64_t from, int64_t to) {
  const int padded_end = begin + (end - begin + kWidth - 1) / kWidth * kWidth;
  if (from <= begin && to >= padded_end) return false;
  for (int n = begin; n < padded_end && n < from; ++n) scores[n] = -kInfinity;
  for (int n = to < begin ? begin : static_cast<int>(to); n < padded_end; ++n)
    scores[n] = -kInfinity;
  return true;
}

// Masks columns that have no page. Answers true.
inline bool mask_absent(float* scores, int begin, int end, const Absent& absent) {
  for (int n = begin; n < end; ++n) scores[n] = absent.column[n] ? -kInfinity : scores[n];
  return true;
}

// Turns scores into weights e^(score - base) and returns sums of them. With kMark, a masked key's
// is -0: it is told from one whose weight underflows.
template <bool kMark>
Vec exponentiate(float* scores, int begin, int end, float base) {
  Vec total{};
  for (int n = begin; n < end; n += kWidth) {
    const Vec score = load(scores + n);
    Vec weight = exp_nonpositive(score - base);
    if (kMark) weight = score == -kInfinity ? -Vec{} : weight;
    total += weight;
    store(scores + n, weight);
  }
  return total;
}

FLASHONNX_INLINE bool is_masked(float weight) {
  int32_t bits;
  __builtin_memcpy(&bits, &weight, sizeof bits);
  return bits == INT32_MIN;
}

}  // namespace flashonnx::cpu::FLASHONNX_CPU_ISA

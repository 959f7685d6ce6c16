// The online softmax of a warpgroup's rows.
//
// A row's maximum is a stale one: it is raised, and what was summed before rescaled, only when a
// score exceeds it by more than 2^kSlack. The result is the same (numerator and denominator share
// the factor), P stays far inside the range of both 16-bit types, and after the first tiles neither
// a reduction over lanes nor a pass over the output is needed.
#pragma once

#include <cfloat>

#include "kernels/sm90/mma.cuh"

namespace flashonnx::sm90 {

constexpr float kSlack = 8.f;
constexpr float kMost = 256.f;  // 2^kSlack, of P

// Places of a consumer thread: rows `row` and `row` + 8 of its warp's 16; columns 8 n + 2 * `quad`
// and the next, n counting groups of four registers. Register 4 n + 2 h + e is row + 8 h, column
// 8 n + 2 quad + e.
struct Lane {
  int group, warp, lane, row, quad;
  __device__ __forceinline__ Lane()
      // The same in all lanes, told to the compiler.
      : group(__shfl_sync(0xffffffffu, threadIdx.x / 128, 0) - 1),
        warp(threadIdx.x / 32 % 4),
        lane(threadIdx.x % 32),
        row(lane / 4),
        quad(lane % 4) {}
  __device__ __forceinline__ int first_row() const { return group * 64 + warp * 16 + row; }
};

// The general kernel counts scores and maxima in powers of 4: the most negative numbers of a mask
// stay finite then (a row full of them is a row of equals), and cost no comparison.
struct RowState {
  float maximum[2];  // in powers of 2, or of 4; -FLT_MAX: no key yet
  float sum[2];      // of P over this thread's keys
};

// The factors, apart from `state`, by which sums up to now have to be multiplied.
struct Raise {
  bool any;  // in this warp
  float keep[2];
};

// Raises the rows' maxima if a score asks for it, and the sums with them.
template <class C>
__device__ __forceinline__ Raise raise_maxima(const float (&scores)[C::kScores], float factor,
                                              RowState& state) {
  float top[2];
  bool exceeds = false;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float x = fmaxf(scores[2 * h], scores[2 * h + 1]);
#pragma unroll
    for (int n = 1; n < C::kScores / 4; ++n)
      x = fmaxf(x, fmaxf(scores[4 * n + 2 * h], scores[4 * n + 2 * h + 1]));
    top[h] = x * factor;
    exceeds |= top[h] > state.maximum[h] + (C::kGeneral ? kSlack / 2 : kSlack);
  }
  Raise raise = {__any_sync(0xffffffffu, exceeds) != 0, {1.f, 1.f}};
  if (!raise.any) return raise;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float next = fmaxf(state.maximum[h], quad_maximum(top[h]));
    raise.keep[h] = exp2_approximate((state.maximum[h] - next) * (C::kGeneral ? 2.f : 1.f));
    state.maximum[h] = next;
    state.sum[h] *= raise.keep[h];
  }
  return raise;
}

// The rows' sums, in two chains each: head size 64 waits for a single one (526 instead of 544
// TFLOP/s).
template <class C>
__device__ __forceinline__ void add_up(const float (&scores)[C::kScores], RowState& state) {
  float sums[2][2] = {};
#pragma unroll
  for (int i = 0; i < C::kScores; ++i) sums[i / 2 % 2][i / 4 % 2] += scores[i];
#pragma unroll
  for (int h = 0; h < 2; ++h) state.sum[h] += sums[h][0] + sums[h][1];
}

// scores = P = 2^(factor * scores - maximum).
template <class C>
__device__ __forceinline__ void exponentiate(float factor, float (&scores)[C::kScores],
                                             const RowState& state) {
#pragma unroll
  for (int i = 0; i < C::kScores; ++i)
    scores[i] = exp2_approximate(fmaf(scores[i], factor, -state.maximum[i / 2 % 2]));
}

// P, and the maxima after that: of scores that rarely ask for a higher one. Where they do, P is
// brought down afterwards; a P beyond the range of float32 leaves an infinite maximum behind.
//
// None is negative, and so they compare as integers do, three at a time; NaN is the largest.
template <class C>
__device__ __forceinline__ Raise exponentiate_first(float factor, float (&scores)[C::kScores],
                                                    RowState& state) {
  exponentiate<C>(factor, scores, state);
  int top[4] = {};
#pragma unroll
  for (int i = 0; i < C::kScores; i += 2) {
    top[i / 2 % 4] =
        __vimax3_s32(top[i / 2 % 4], __float_as_int(scores[i]), __float_as_int(scores[i + 1]));
  }
  const int most = max(max(top[0], top[1]), max(top[2], top[3]));
  Raise raise = {__any_sync(0xffffffffu, most > __float_as_int(kMost)) != 0, {1.f, 1.f}};
  if (raise.any) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float x = 1.f;
#pragma unroll
      for (int n = 0; n < C::kScores / 4; ++n)
        x = fmaxf(x, fmaxf(scores[4 * n + 2 * h], scores[4 * n + 2 * h + 1]));
      const float next = state.maximum[h] + __log2f(quad_maximum(x));
      raise.keep[h] = exp2_approximate(state.maximum[h] - next);
      state.maximum[h] = next;
      state.sum[h] *= raise.keep[h];
    }
#pragma unroll
    for (int i = 0; i < C::kScores; ++i) scores[i] *= raise.keep[i / 2 % 2];
  }
  return raise;
}

__device__ __forceinline__ bool overflowed(const RowState& state) {
  return fmaxf(state.maximum[0], state.maximum[1]) == INFINITY;
}

// As well for scores in powers of 4.
template <class C>
__device__ __forceinline__ void exponentiate_fours(float (&scores)[C::kScores],
                                                   const RowState& state) {
  constexpr float kExtreme = -FLT_MAX / 4;  // doubled, it comes near the range's end
  const auto extreme = [](float x) { return x < kExtreme && x > -FLT_MAX; };
  if (__any_sync(0xffffffffu, extreme(state.maximum[0]) || extreme(state.maximum[1]))) {
#pragma unroll
    for (int i = 0; i < C::kScores; ++i)
      scores[i] = exp2_approximate(2.f * (scores[i] - state.maximum[i / 2 % 2]));
  } else {
    const float minus[2] = {fminf(-2.f * state.maximum[0], FLT_MAX),
                            fminf(-2.f * state.maximum[1], FLT_MAX)};
#pragma unroll
    for (int i = 0; i < C::kScores; ++i)
      scores[i] = exp2_approximate(fmaf(scores[i], 2.f, minus[i / 2 % 2]));
  }
}

// P as the A operand: accumulators of two 8-column groups are one 16-key operand.
template <class T, class C>
__device__ __forceinline__ void pack_scores(const float (&scores)[C::kScores],
                                            uint32_t (&p)[C::kScores / 2]) {
#pragma unroll
  for (int i = 0; i < C::kScores / 2; ++i) p[i] = pack<T>(scores[2 * i], scores[2 * i + 1]);
}

template <class C>
__device__ __forceinline__ void rescale(const Raise& raise, float (&output)[C::kOutputs]) {
#pragma unroll
  for (int i = 0; i < C::kOutputs; ++i) output[i] *= raise.keep[i / 2 % 2];
}

}  // namespace flashonnx::sm90

// The online softmax of a warpgroup's rows.
//
// A row's maximum is a stale one: it is raised, and what was summed before rescaled, only when a
// score exceeds it by more than 2^kSlack. The result is the same (numerator and denominator share
// the factor), P stays far inside the range of both 16-bit types, and after the first tiles neither
// a reduction over lanes nor a pass over the output is needed.
#pragma once

#include <cfloat>

#include "kernels/sm90/coarse.cuh"
#include "kernels/sm90/mma.cuh"
#include "kernels/sm90/visible.cuh"

namespace flashonnx::sm90 {

constexpr float kSlack = 8.f;
constexpr float kMost = 256.f;      // 2^kSlack, of P
constexpr float kMostSum = 2048.f;  // as well, of a tile's P of a row that a thread has

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

  // The same, of which the compiler keeps no sums and multiples in registers between its uses.
  __device__ __forceinline__ Lane anew() const {
    Lane x = *this;
    x.warp = forgotten(warp);
    x.lane = forgotten(lane);
    x.row = x.lane / 4, x.quad = x.lane % 4;
    return x;
  }
};

// The general kernel keeps maxima in the units of its scores, which are those of a mask where there
// is one: its most negative numbers stay finite then, and a row full of them is a row of equals.
struct RowState {
  float maximum[2];  // in powers of 2, or as said; -FLT_MAX: no key yet
  float sum[2];      // of P over this thread's keys
};

// The factors, apart from `state`, by which sums up to now have to be multiplied.
struct Raise {
  bool any;  // in this warp
  float keep[2];
};

// Raises the rows' maxima if a score asks for it, and the sums with them. Scores times `factor` are
// powers of 2.
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
    top[h] = C::kGeneral ? x : C::kBiasProduct ? coarse(x, factor) * factor : x * factor;
    exceeds |=
        C::kGeneral ? (x - state.maximum[h]) * factor > kSlack : top[h] > state.maximum[h] + kSlack;
  }
  Raise raise = {__any_sync(0xffffffffu, exceeds) != 0, {1.f, 1.f}};
  if (!raise.any) return raise;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float next = fmaxf(state.maximum[h], quad_maximum(top[h]));
    raise.keep[h] = exp2_approximate((state.maximum[h] - next) * (C::kGeneral ? factor : 1.f));
    state.maximum[h] = next;
    state.sum[h] *= raise.keep[h];
  }
  return raise;
}

// Of a tile's P over this thread's keys.
struct RowSums {
  float row[2];
};

// In two chains a row: head size 64 waits for a single one (526 instead of 544 TFLOP/s).
template <class C, int kFirst = 0, int kEnd = C::kScores>
__device__ __forceinline__ RowSums row_sums(const float (&scores)[C::kScores]) {
  float sums[2][2] = {};
#pragma unroll
  for (int i = kFirst; i < kEnd; ++i) sums[i / 2 % 2][i / 4 % 2] += scores[i];
  return {{sums[0][0] + sums[0][1], sums[1][0] + sums[1][1]}};
}
__device__ __forceinline__ void add_up(const RowSums& sums, RowState& state) {
#pragma unroll
  for (int h = 0; h < 2; ++h) state.sum[h] += sums.row[h];
}

// scores = P = 2^(factor * scores - maximum).
template <class C, int kFirst = 0, int kEnd = C::kScores>
__device__ __forceinline__ void exponentiate(float factor, float (&scores)[C::kScores],
                                             const RowState& state) {
#pragma unroll
  for (int i = kFirst; i < kEnd; ++i)
    scores[i] = exp2_approximate(fmaf(scores[i], factor, -state.maximum[i / 2 % 2]));
}

// Whether a tile's scores, of which the largest bias is `top`, will not exceed the maxima by more
// than those of a tile without a mask do.
__device__ __forceinline__ bool is_near(float top, const RowState& state) {
  constexpr float kRise = 64.f;
  const float low = fminf(state.maximum[0], state.maximum[1]);
  const float high = fmaxf(state.maximum[0], state.maximum[1]);
  return low >= fmaxf(top - kRise, -kHuge) && high <= kHuge;
}

// As well after `raise_maxima`, where maxima may be huge.
template <class C>
__device__ __forceinline__ void exponentiate_after(float factor, float (&scores)[C::kScores],
                                                   const RowState& state) {
  const auto huge = [&](int h) {
    return fabsf(state.maximum[h]) > kHuge && state.maximum[h] > -FLT_MAX;
  };
  const bool rows[2] = {huge(0), huge(1)};
  if (C::kBiasProduct && __any_sync(0xffffffffu, rows[0] || rows[1])) {
#pragma unroll
    for (int i = 0; i < C::kScores; ++i) {
      // A row's other scores are huge as well, or their P is 0.
      scores[i] = (rows[i / 2 % 2] ? coarse(scores[i]) : scores[i]) * factor;
    }
    factor = 1.f;
  }
  exponentiate<C>(factor, scores, state);
}

// P as well, where no row of the warp sees the tile's keys from `end` on: what they would take is
// left out.
template <class C>
__device__ __forceinline__ void exponentiate_before(int end, float factor,
                                                    float (&scores)[C::kScores],
                                                    const RowState& state) {
  constexpr int kPart = 16;  // of 32 keys
#pragma unroll
  for (int first = 0; first < C::kScores; first += kPart) {
    if (2 * first < end) {
#pragma unroll
      for (int i = first; i < first + kPart; ++i)
        scores[i] = exp2_approximate(fmaf(scores[i], factor, -state.maximum[i / 2 % 2]));
    } else {
#pragma unroll
      for (int i = first; i < first + kPart; ++i) scores[i] = 0.f;
    }
  }
}

// Whether P was made with too low a maximum. None is negative, so the sums are at least as large;
// otherwise P compare as integers do, three at a time. NaN is too large.
template <class C>
__device__ __forceinline__ bool exceeds(const float (&scores)[C::kScores], const RowSums& sums) {
  if constexpr (C::kSumsBound) {
    return !(sums.row[0] <= kMostSum && sums.row[1] <= kMostSum);
  } else {
    int top[4] = {};
#pragma unroll
    for (int i = 0; i < C::kScores; i += 2) {
      top[i / 2 % 4] =
          __vimax3_s32(top[i / 2 % 4], __float_as_int(scores[i]), __float_as_int(scores[i + 1]));
    }
    return max(max(top[0], top[1]), max(top[2], top[3])) > __float_as_int(kMost);
  }
}

// The maxima after P: of scores that rarely ask for a higher one. Where they do, P is brought down;
// a P beyond the range of float32 leaves an infinite maximum behind. Adds up the sums where
// they bound P.
template <class C>
__device__ __forceinline__ Raise bring_down(float (&scores)[C::kScores], RowSums sums,
                                            RowState& state) {
  Raise raise = {__any_sync(0xffffffffu, exceeds<C>(scores, sums)) != 0, {1.f, 1.f}};
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
    if (C::kSumsBound) sums = row_sums<C>(scores);
  }
  if (C::kSumsBound) add_up(sums, state);
  return raise;
}

// The first of them, before anything else: the assembler moves nothing over a branch, which is
// never taken.
template <class C>
__device__ __forceinline__ void exponentiate_before_turn(float factor, float (&scores)[C::kScores],
                                                         const RowState& state) {
  exponentiate<C, 0, C::kBeforeTurn>(factor, scores, state);
  if (__float_as_uint(scores[C::kBeforeTurn - 1]) == 0xffffffffu) pause();
}

template <class C>
__device__ __forceinline__ Raise exponentiate_first(float factor, float (&scores)[C::kScores],
                                                    RowState& state) {
  exponentiate<C, C::kBeforeTurn>(factor, scores, state);
  return bring_down<C>(scores, C::kSumsBound ? row_sums<C>(scores) : RowSums{}, state);
}

// Keeps what x is made of before what follows, by a store that never happens: x is no NaN but the
// common one.
__device__ __forceinline__ void hold(float x) {
  asm volatile(
      "{\n"
      ".reg .pred never;\n"
      "setp.eq.u32 never, %0, 0xffffffff;\n"
      "@never st.shared.b32 [%1], %0;\n"
      "}\n" ::"r"(__float_as_int(x)),
      "r"(0)
      : "memory");
}

__device__ __forceinline__ bool overflowed(const RowState& state) {
  return fmaxf(state.maximum[0], state.maximum[1]) == INFINITY;
}

// As well for maxima in units of the scores.
template <class C>
__device__ __forceinline__ void exponentiate_general(float factor, float (&scores)[C::kScores],
                                                     RowState& state) {
  // Where a maximum is so large that its product with the factor is too coarse, or infinite.
  constexpr float kExtreme = 1 << 20;
  const float powers[2] = {state.maximum[0] * factor, state.maximum[1] * factor};
  const auto extreme = [&](int h) {
    return fabsf(powers[h]) > kExtreme && state.maximum[h] > -FLT_MAX;
  };
  if (__any_sync(0xffffffffu, extreme(0) || extreme(1))) {
#pragma unroll
    for (int i = 0; i < C::kScores; ++i)
      scores[i] = exp2_approximate(factor * (scores[i] - state.maximum[i / 2 % 2]));
  } else {
    const float minus[2] = {fminf(-powers[0], FLT_MAX), fminf(-powers[1], FLT_MAX)};
#pragma unroll
    for (int i = 0; i < C::kScores; ++i)
      scores[i] = exp2_approximate(fmaf(scores[i], factor, minus[i / 2 % 2]));
  }
}

// From a tile's scores to P, in place. `near`: P may be made first, maxima then. `kBounds`: no row
// of the warp sees keys from `end` on.
template <class C, bool kBounds>
__device__ __forceinline__ Raise exponentiate_tile(bool near, int end, float factor,
                                                   float (&scores)[C::kScores], RowState& state) {
  if (!C::kGeneral && !C::kPacksEarly && near) [[likely]]
    return exponentiate_first<C>(factor, scores, state);
  const Raise raise = raise_maxima<C>(scores, factor, state);
  if constexpr (C::kGeneral) {
    exponentiate_general<C>(factor, scores, state);
  } else if constexpr (kBounds && C::kLeavesOutHidden) {
    exponentiate_before<C>(end, factor, scores, state);
  } else {
    exponentiate_after<C>(factor, scores, state);
  }
  return raise;
}

// P as the A operand: accumulators of two 8-column groups are one 16-key operand.
template <class T, class C, int kFirst = 0, int kEnd = C::kScores>
__device__ __forceinline__ void pack_scores(const float (&scores)[C::kScores],
                                            uint32_t (&p)[C::kScores / 2]) {
#pragma unroll
  for (int i = kFirst / 2; i < kEnd / 2; ++i) p[i] = pack<T>(scores[2 * i], scores[2 * i + 1]);
}

template <class C>
__device__ __forceinline__ void rescale(const Raise& raise, float (&output)[C::kOutputs]) {
#pragma unroll
  for (int i = 0; i < C::kOutputs; ++i) output[i] *= raise.keep[i / 2 % 2];
}

// As `exponentiate_first`, and P as an operand, and the output by the maxima. `end_product` waits
// for the product that uses the P before and makes the output, when half of the exponentials are
// made: their P is packed beside the others.
template <class T, class C, class EndProduct>
__device__ __forceinline__ void exponentiate_and_pack(float factor, float (&scores)[C::kScores],
                                                      uint32_t (&p)[C::kScores / 2],
                                                      float (&output)[C::kOutputs], RowState& state,
                                                      EndProduct end_product) {
  constexpr int kHalf = C::kScores / 2;
  exponentiate<C, 0, kHalf>(factor, scores, state);
  RowSums sums = row_sums<C, 0, kHalf>(scores);
  hold(sums.row[0] + sums.row[1]);
  end_product();
  exponentiate<C, kHalf, C::kScores>(factor, scores, state);
  pack_scores<T, C, 0, kHalf>(scores, p);
  const RowSums rest = row_sums<C, kHalf, C::kScores>(scores);
  sums.row[0] += rest.row[0], sums.row[1] += rest.row[1];
  const Raise raise = bring_down<C>(scores, sums, state);
  if (raise.any) {
    rescale<C>(raise, output);
    pack_scores<T, C, 0, kHalf>(scores, p);
  }
  pack_scores<T, C, kHalf, C::kScores>(scores, p);
}

}  // namespace flashonnx::sm90

// The online softmax of a warp's rows, and P V. Scores come with the factor that turns them into
// powers of 2.
//
// A row's maximum is a stale one: it is raised, and what was summed before rescaled, only when a
// score exceeds it by more than 2^kSlack. The result is the same (numerator and denominator share
// the factor), P stays far inside the range of both 16-bit types, and after the first tiles neither
// a reduction over lanes nor a pass over the output is needed.
#pragma once

#include <cfloat>
#include <cmath>

#include "kernels/sm80/load.cuh"

namespace flashonnx::sm80 {

constexpr float kSlack = 8.f;  // P up to 256

// Places of a thread: rows `row` + 8 h of each 16-row tile of its warp; keys from kRun * `quad` on
// in the scores; features 2 * `quad` and the next of each 8 in the output.
struct Lane {
  int warp, lane, row, quad;
  __device__ __forceinline__ Lane()
      : warp(threadIdx.x / 32), lane(threadIdx.x % 32), row(lane / 4), quad(lane % 4) {}
};

template <int kRowTiles, int kDimTiles>
struct RowSums {
  float output[kRowTiles][kDimTiles][4];  // sum of P V; [2 h + e] is row + 8 h, feature e
  float maximum[kRowTiles][2];            // in powers of 2; -FLT_MAX: no key yet
  float sum[kRowTiles][2];                // of P over this thread's keys
};

template <class C>
using RowState = RowSums<C::kRowTiles, C::kDimTiles>;

template <class C>
struct Scores {
  float at[C::kRowTiles][C::kKeyTiles][4];  // [2 h + e] is row + 8 h, key 2 n + e of the run
};

template <class C>
__device__ __forceinline__ void clear(RowState<C>& state) {
#pragma unroll
  for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
    for (int d = 0; d < C::kDimTiles; ++d) {
#pragma unroll
      for (int i = 0; i < 4; ++i) state.output[r][d][i] = 0.f;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) state.maximum[r][h] = -FLT_MAX, state.sum[r][h] = 0.f;
  }
}

// Over the lanes of the warp, as a float that is not less: its bits are ordered as a signed
// integer.
__device__ __forceinline__ float warp_maximum(float x) {
  const int bits = __float_as_int(x);
  const int greatest = __reduce_max_sync(0xffffffffu, bits ^ (bits >> 31 & 0x7fffffff));
  return __int_as_float(greatest ^ (greatest >> 31 & 0x7fffffff));
}

// Raises the rows' maxima to `top`, of the lane's keys.
template <class C>
__device__ __forceinline__ void raise(const float (&top)[C::kRowTiles][2], RowState<C>& state) {
#pragma unroll
  for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float next = fmaxf(state.maximum[r][h], quad_maximum(top[r][h]));
      const float keep = exp2_approximate(state.maximum[r][h] - next);
      state.maximum[r][h] = next;
      state.sum[r][h] *= keep;
#pragma unroll
      for (int d = 0; d < C::kDimTiles; ++d) {
        state.output[r][d][2 * h] *= keep;
        state.output[r][d][2 * h + 1] *= keep;
      }
    }
  }
}

template <class C>
__device__ __forceinline__ float top_score(const Scores<C>& scores, int r, int h) {
  float x = fmaxf(scores.at[r][0][2 * h], scores.at[r][0][2 * h + 1]);
#pragma unroll
  for (int n = 1; n < C::kKeyTiles; ++n)
    x = fmaxf(x, fmaxf(scores.at[r][n][2 * h], scores.at[r][n][2 * h + 1]));
  return x;
}

// Raises the rows' maxima if a score asks for it.
template <class C>
__device__ __forceinline__ void raise_maxima(const Scores<C>& scores, float factor,
                                             RowState<C>& state) {
  float top[C::kRowTiles][2];
  bool asks = false;
#pragma unroll
  for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      top[r][h] = top_score<C>(scores, r, h) * factor;
      asks |= top[r][h] > state.maximum[r][h] + kSlack;
    }
  }
  if (__any_sync(0xffffffffu, asks)) raise<C>(top, state);
}

__device__ __forceinline__ float reciprocal_approximate(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Whether products can begin with the rows' maxima instead of 0: sums then have these maxima's last
// bits, as scores of their size have them anyway. Biases, of which `bound` is the greatest of the
// lane's run, may not raise them out of there.
template <class C>
__device__ __forceinline__ bool all_near(const RowState<C>& state, float bound) {
  constexpr float kNear = 128.f;
  bool near = bound <= kNear;
#pragma unroll
  for (int r = 0; r < C::kRowTiles; ++r)
    near &= fabsf(state.maximum[r][0]) <= kNear && fabsf(state.maximum[r][1]) <= kNear;
  return __all_sync(0xffffffffu, near);
}

// As raise_maxima, of scores from which the maxima have been taken already, and which go without
// `biases`, those of the lane's run and a bound of them: the greatest score and the bound ask,
// which costs no pass over the scores.
template <class C>
__device__ __forceinline__ void raise_taken(Scores<C>& scores, float factor, const float* biases,
                                            RowState<C>& state) {
  const float bound = biases[C::kRun];
  bool asks = false;
#pragma unroll
  for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
    for (int h = 0; h < 2; ++h) asks |= fmaf(top_score<C>(scores, r, h), factor, bound) > kSlack;
  }
  if (!__any_sync(0xffffffffu, asks)) return;
  float top[C::kRowTiles][2], before[C::kRowTiles][2];
#pragma unroll
  for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float x = -INFINITY;
#pragma unroll
      for (int i = 0; i < C::kRun; ++i)
        x = fmaxf(x, fmaf(scores.at[r][i / 2][2 * h + i % 2], factor, biases[i]));
      before[r][h] = state.maximum[r][h];
      top[r][h] = before[r][h] + x;
    }
  }
  raise<C>(top, state);
#pragma unroll
  for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float less = __fdividef(before[r][h] - state.maximum[r][h], factor);
#pragma unroll
      for (int i = 0; i < C::kRun; ++i) scores.at[r][i / 2][2 * h + i % 2] += less;
    }
  }
}

template <class C>
__device__ __forceinline__ void take_maxima(const RowState<C>& state, Scores<C>& scores) {
#pragma unroll
  for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
    for (int n = 0; n < C::kKeyTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores.at[r][n][i] -= state.maximum[r][i / 2];
    }
  }
}

// P = 2^(factor * scores - maximum), or with `biases` in the place of -maximum; then output += P V,
// 16 keys at a time so that exponentials and products interleave. `values` is the lane's address
// for ldmatrix.
template <class T, class C, bool kBiased>
__device__ __forceinline__ void add_values(Scores<C>& scores, float factor, const float* biases,
                                           uint32_t values, RowState<C>& state) {
  using L = KeyLayout<C>;
#pragma unroll
  for (int n = 0; n < C::kKeyTiles; n += 2) {
    uint32_t p[C::kRowTiles]
              [4];  // accumulators of two 16 x 8 tiles are the operand of one 16 x 16 tile
    float bias[4] = {};
    if constexpr (kBiased) {
      const float4 four = *reinterpret_cast<const float4*>(biases + 2 * n);
      bias[0] = four.x, bias[1] = four.y, bias[2] = four.z, bias[3] = four.w;
    }
#pragma unroll
    for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float (&s)[4] = scores.at[r][n + half];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float addend = kBiased ? bias[2 * half + i % 2] : -state.maximum[r][i / 2];
          s[i] = exp2_approximate(fmaf(s[i], factor, addend));
          state.sum[r][i / 2] += s[i];
        }
        p[r][2 * half] = pack<T>(s[0], s[1]);
        p[r][2 * half + 1] = pack<T>(s[2], s[3]);
      }
    }
#pragma unroll
    for (int d = 0; d < C::kDimTiles; d += 2) {
      uint32_t v[4];
      load_matrices_transposed(v, L::advance(values, d) + 2 * n * C::kDim * 2);
#pragma unroll
      for (int r = 0; r < C::kRowTiles; ++r) {
        multiply<T>(state.output[r][d], p[r], v[0], v[1]);
        multiply<T>(state.output[r][d + 1], p[r], v[2], v[3]);
      }
    }
  }
}

}  // namespace flashonnx::sm80

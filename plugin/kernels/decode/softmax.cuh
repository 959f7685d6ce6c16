// Transposed products, and the online softmax of a warp's rows between them. As in the sm80 kernel
// a row's maximum is a stale one, which is raised only when a score exceeds it by more than
// 2^kSlack.
#pragma once

#include <cfloat>
#include <cmath>

#include "kernels/decode/load.cuh"

namespace flashonnx::decode {

constexpr float kSlack = 8.f;  // P up to 256

// Places of a thread in accumulators: keys or features `column` and `column` + 8 of 16, queries 2 *
// `quad` and the next of each 8.
struct Lane {
  int warp, lane, column, quad;
  __device__ __forceinline__ Lane()
      : warp(threadIdx.x / 32), lane(threadIdx.x % 32), column(lane / 4), quad(lane % 4) {}
};

template <class C>
struct RowState {
  float output[C::kSteps][C::kRowTiles][4];  // sum of V^T P^T; [2 h + e]: feature + 8 h, row e
  float maximum[C::kRowTiles][2];            // in powers of 2; -FLT_MAX: no key yet
  float sum[C::kRowTiles][2];                // of P over this thread's keys
};

template <class C>
using Scores = float[C::kRowTiles][4];  // [2 h + e]: key + 8 h, row e

template <class C>
using Queries = uint32_t[C::kSteps][C::kRowTiles][2];

template <class C>
__device__ __forceinline__ void clear(RowState<C>& state) {
#pragma unroll
  for (int n = 0; n < C::kRowTiles; ++n) {
#pragma unroll
    for (int t = 0; t < C::kSteps; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) state.output[t][n][i] = 0.f;
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) state.maximum[n][e] = -FLT_MAX, state.sum[n][e] = 0.f;
  }
}

// Over the lanes of a warp that are the same modulo kFirst: 4 are the eight that share a row.
template <int kFirst, class Op>
__device__ __forceinline__ float reduce_lanes(float x, Op op) {
#pragma unroll
  for (int distance = kFirst; distance < 32; distance *= 2)
    x = op(x, __shfl_xor_sync(0xffffffffu, x, distance));
  return x;
}

// An 8 x 8 matrix of 16-bit elements, a pair of a row a thread: from rows to columns.
__device__ __forceinline__ uint32_t transpose(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// scores = K Q^T. `keys` is the lane's address for ldmatrix. Two sums for each score: one would be
// a chain of kSteps dependent products.
template <class T, class C>
__device__ __forceinline__ void multiply_keys(uint32_t keys, const Queries<C>& q,
                                              Scores<C>& scores) {
  Scores<C> odd;
#pragma unroll
  for (int n = 0; n < C::kRowTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[n][i] = odd[n][i] = 0.f;
  }
#pragma unroll
  for (int step = 0; step < C::kSteps; ++step) {
    uint32_t k[4];
    sm80::load_matrices(k, advance(keys, 2 * step));
#pragma unroll
    for (int n = 0; n < C::kRowTiles; ++n)
      sm80::multiply<T>(step % 2 ? odd[n] : scores[n], k, q[step][n][0], q[step][n][1]);
  }
#pragma unroll
  for (int n = 0; n < C::kRowTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[n][i] += odd[n][i];
  }
}

// Raises the rows' maxima if a score asks for it.
template <class C>
__device__ __forceinline__ void raise_maxima(const Scores<C>& scores, float factor,
                                             RowState<C>& state) {
  float top[C::kRowTiles][2];
  bool raise = false;
#pragma unroll
  for (int n = 0; n < C::kRowTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      top[n][e] = fmaxf(scores[n][e], scores[n][2 + e]) * factor;
      raise |= top[n][e] > state.maximum[n][e] + kSlack;
    }
  }
  if (!__any_sync(0xffffffffu, raise)) return;
#pragma unroll
  for (int n = 0; n < C::kRowTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float best = reduce_lanes<4>(top[n][e], [](float a, float b) { return fmaxf(a, b); });
      const float next = fmaxf(state.maximum[n][e], best);
      const float keep = exp2_approximate(state.maximum[n][e] - next);
      state.maximum[n][e] = next;
      state.sum[n][e] *= keep;
#pragma unroll
      for (int t = 0; t < C::kSteps; ++t) {
        state.output[t][n][e] *= keep;
        state.output[t][n][2 + e] *= keep;
      }
    }
  }
}

// P = 2^(factor * scores - maximum), in place of the scores.
template <class C>
__device__ __forceinline__ void exponentiate(float factor, Scores<C>& scores, RowState<C>& state) {
#pragma unroll
  for (int n = 0; n < C::kRowTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scores[n][i] = exp2_approximate(fmaf(scores[n][i], factor, -state.maximum[n][i % 2]));
      state.sum[n][i % 2] += scores[n][i];
    }
  }
}

// output += V^T P^T. `values` is the lane's address for ldmatrix.
template <class T, class C>
__device__ __forceinline__ void add_values(const Scores<C>& probabilities, uint32_t values,
                                           RowState<C>& state) {
  uint32_t p[C::kRowTiles][2];
#pragma unroll
  for (int n = 0; n < C::kRowTiles; ++n) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      p[n][h] = transpose(pack<T>(probabilities[n][2 * h], probabilities[n][2 * h + 1]));
    }
  }
#pragma unroll
  for (int t = 0; t < C::kSteps; ++t) {
    uint32_t v[4];
    sm80::load_matrices_transposed(v, advance(values, 2 * t));
#pragma unroll
    for (int n = 0; n < C::kRowTiles; ++n)
      sm80::multiply<T>(state.output[t][n], v, p[n][0], p[n][1]);
  }
}

// The same without tensor cores, element by element: what is masked is left out, not multiplied by
// zero, so that an infinity or a NaN in its slot of V does not matter. `tile` is V's first row.
template <class T, class C>
__device__ __forceinline__ void add_values_carefully(const Lane& lane, const Scores<C>& scores,
                                                     const Scores<C>& probabilities, uint32_t tile,
                                                     RowState<C>& state) {
#pragma unroll 1
  for (int key = 0; key < C::kKeys; ++key) {
    const int source = key % 8 * 4 + lane.quad;
#pragma unroll
    for (int n = 0; n < C::kRowTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float score =
            __shfl_sync(0xffffffffu, key < 8 ? scores[n][e] : scores[n][2 + e], source);
        const float p = __shfl_sync(
            0xffffffffu, key < 8 ? probabilities[n][e] : probabilities[n][2 + e], source);
        const bool seen = score != -INFINITY;
#pragma unroll
        for (int t = 0; t < C::kSteps; ++t) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const uint32_t at = tile + tile_offset<C>(key, 2 * t + h) + lane.column * 2;
            uint16_t bits;
            asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bits) : "r"(at));
            float v;
            if constexpr (std::is_same_v<T, __half>) {
              v = __half2float(__ushort_as_half(bits));
            } else {
              v = __uint_as_float(uint32_t{bits} << 16);
            }
            if (seen) state.output[t][n][2 * h + e] = fmaf(p, v, state.output[t][n][2 * h + e]);
          }
        }
      }
    }
  }
}

// Whether the output holds a NaN or an infinity.
template <class C>
__device__ __forceinline__ bool holds_nonfinite(const RowState<C>& state) {
  float sum = 0.f;
#pragma unroll
  for (int t = 0; t < C::kSteps; ++t) {
#pragma unroll
    for (int n = 0; n < C::kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sum = fmaf(state.output[t][n][i], 0.f, sum);
    }
  }
  return sum != 0.f;
}

}  // namespace flashonnx::decode

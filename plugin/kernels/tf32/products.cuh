// The two matrix products of a warp's rows, on tensor cores.
#pragma once

#include "kernels/tf32/load.cuh"
#include "kernels/tf32/split.cuh"

namespace flashonnx::tf32 {

// scores = Q K^T. `queries` and `keys` are the lane's addresses for ldmatrix.
template <class C>
__device__ __forceinline__ void multiply_keys(uint32_t queries, uint32_t keys, Scores<C>& scores) {
  Scores<C> small = {};
  scores = {};
#pragma unroll
  for (int d = 0; d < C::kDimTiles; ++d) {
    Split<4> q[C::kRowTiles];
#pragma unroll
    for (int r = 0; r < C::kRowTiles; ++r) {
      uint32_t x[4];
      load_matrices(x, QueryLayout<C>::advance(queries, 2 * d) + r * 16 * C::kDim * 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) q[r].set(i, __uint_as_float(x[i]));
    }
#pragma unroll
    for (int n = 0; n < C::kKeyTiles; n += 2) {
      uint32_t x[4];
      load_matrices(x, KeyLayout<C>::advance(keys, 2 * d) + 2 * n * C::kDim * 4);
      Split<4> k;
#pragma unroll
      for (int i = 0; i < 4; ++i) k.set(i, __uint_as_float(x[i]));
      multiply<C::kRowTiles>([&](int r, int t) -> auto& { return scores.at[r][n + t]; },
                             [&](int r, int t) -> auto& { return small.at[r][n + t]; }, q, k);
    }
  }
#pragma unroll
  for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
    for (int n = 0; n < C::kKeyTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores.at[r][n][i] += small.at[r][n][i];
    }
  }
}

__device__ __forceinline__ float2 load_pair(uint32_t shared) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(shared) : "memory");
  return x;
}

// P = 2^(factor * scores - maximum), then output += P V. `values` is the lane's address of features
// 2 * `row` and the next of its run's first key.
//
// An accumulator of scores is an operand with its columns in the order 0, 2, 4, 6, 1, 3, 5, 7:
// those are the keys of V's rows. Features are dealt out too: of each 16, a thread has the 4 from 4
// * `quad` on in its output, output[r][2 d + t][2 h + e] being feature 2 e + t of them.
template <class C>
__device__ __forceinline__ void multiply_values(const Scores<C>& scores, float factor,
                                                uint32_t values, RowState<C>& state) {
  Split<4> p[C::kKeyTiles][C::kRowTiles];
#pragma unroll
  for (int r = 0; r < C::kRowTiles; ++r) {
    float sum[2] = {};  // of the tile: one by one, small P would be lost beside the row's sum
#pragma unroll
    for (int n = 0; n < C::kKeyTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float x =
            exp2_approximate(fmaf(scores.at[r][n][i], factor, -state.maximum[r][i / 2]));
        sum[i / 2] += x;
        p[n][r].set(i % 2 * 2 + i / 2, x);
      }
    }
    state.sum[r][0] += sum[0], state.sum[r][1] += sum[1];
  }
  const uint32_t even = values, odd = (values ^ 16) + KeyLayout<C>::kRowBytes;
#pragma unroll
  for (int d = 0; d < C::kDimTiles; d += 2) {
    float large[C::kRowTiles][2][4] = {}, small[C::kRowTiles][2][4] = {};
#pragma unroll
    for (int n = 0; n < C::kKeyTiles; ++n) {
      const int step = 2 * n * KeyLayout<C>::kRowBytes;
      const float2 x = load_pair(KeyLayout<C>::advance(even, 2 * d) + step);
      const float2 y = load_pair(KeyLayout<C>::advance(odd, 2 * d) + step);
      Split<4> v;
      v.set(0, x.x), v.set(1, y.x), v.set(2, x.y), v.set(3, y.y);
      multiply<C::kRowTiles>([&](int r, int t) -> auto& { return large[r][t]; },
                             [&](int r, int t) -> auto& { return small[r][t]; }, p[n], v);
    }
#pragma unroll
    for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
      for (int t = 0; t < 2; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) state.output[r][d + t][i] += large[r][t][i] + small[r][t][i];
      }
    }
  }
}

}  // namespace flashonnx::tf32

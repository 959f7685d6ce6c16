// The two products by float32 arithmetic, for blocks that hold infinities or NaN, seen or not.
// Split products of these are NaN, and a mask's -infinity does not remove a NaN; so a block whose
// output holds a NaN walks over its keys once more, with the functions here, in which a product is
// what IEEE arithmetic makes of it, a masked score is selected, and a masked key's V is not looked
// at.
#pragma once

#include "kernels/tf32/mask.cuh"

namespace flashonnx::tf32 {

// The probability of a masked key: no key at all, while one that underflows to 0 still meets its V.
constexpr uint32_t kMasked = 0x80000000u;

__device__ __forceinline__ float4 load_floats(uint32_t shared) {
  const uint4 x = load_shared(shared);
  return {__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z), __uint_as_float(x.w)};
}

// scores = Q K^T. `queries` and `keys`: the tiles in shared memory.
template <class C>
__device__ __forceinline__ void multiply_keys_carefully(const Lane& lane, uint32_t queries,
                                                        uint32_t keys, Scores<C>& scores) {
  scores = {};
#pragma unroll 1
  for (int chunk = 0; chunk < C::kDim / 4; ++chunk) {
    float4 q[C::kRowTiles][2];
#pragma unroll
    for (int i = 0; i < 2 * C::kRowTiles; ++i) {
      const int row = lane.warp * C::kWarpQueries + 8 * i + lane.row;
      q[i / 2][i % 2] = load_floats(queries + QueryLayout<C>::offset(row, chunk));
    }
#pragma unroll
    for (int i = 0; i < C::kRun; ++i) {
      const float4 k = load_floats(keys + KeyLayout<C>::offset(lane.quad * C::kRun + i, chunk));
#pragma unroll
      for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float& score = scores.at[r][i / 2][2 * h + i % 2];
          score = fmaf(q[r][h].x, k.x, score);
          score = fmaf(q[r][h].y, k.y, score);
          score = fmaf(q[r][h].z, k.z, score);
          score = fmaf(q[r][h].w, k.w, score);
        }
      }
    }
  }
}

// As multiply_values, but for P, which is at most 1: where V is as large as float32 goes, 2^kSlack
// would be too much. `values`: the tile in shared memory. P is indexed at run time, and so in
// memory: this is rare, and must not be long to compile.
template <class C>
__device__ __forceinline__ void multiply_values_carefully(const Lane& lane, const Scores<C>& scores,
                                                          float factor, uint32_t values,
                                                          RowState<C>& state) {
  float p[C::kRun][C::kRowTiles][2];
#pragma unroll
  for (int i = 0; i < C::kRun; ++i) {
#pragma unroll
    for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float score = scores.at[r][i / 2][2 * h + i % 2];
        const float x =
            exp2_approximate(fmaf(score, factor, -(state.maximum[r][h] + sm80::kSlack)));
        p[i][r][h] = score == -INFINITY ? __uint_as_float(kMasked) : x;
        state.sum[r][h] += p[i][r][h];
      }
    }
  }
#pragma unroll 1
  for (int key = 0; key < C::kKeys; ++key) {
    const int source = (lane.lane & ~3) | key / C::kRun;  // the thread that has the key's scores
    float weight[C::kRowTiles][2];
#pragma unroll
    for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
        weight[r][h] = __shfl_sync(0xffffffffu, p[key % C::kRun][r][h], source);
    }
#pragma unroll
    for (int d = 0; d < C::kDimTiles; d += 2) {
      const float4 v = load_floats(values + KeyLayout<C>::offset(key, 2 * d + lane.quad));
#pragma unroll
      for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if (__float_as_uint(weight[r][h]) == kMasked) continue;
          float (&a)[4] = state.output[r][d], (&b)[4] = state.output[r][d + 1];
          a[2 * h] = fmaf(weight[r][h], v.x, a[2 * h]);
          b[2 * h] = fmaf(weight[r][h], v.y, b[2 * h]);
          a[2 * h + 1] = fmaf(weight[r][h], v.z, a[2 * h + 1]);
          b[2 * h + 1] = fmaf(weight[r][h], v.w, b[2 * h + 1]);
        }
      }
    }
  }
}

// The maxima that P and the sums are relative to.
template <class C>
__device__ __forceinline__ void end_carefully(RowState<C>& state) {
#pragma unroll
  for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
    for (int h = 0; h < 2; ++h) state.maximum[r][h] += sm80::kSlack;
  }
}

// Whether the output holds a NaN or an infinity (of values that are not split: sums that overflow).
template <class C>
__device__ __forceinline__ bool holds_nan(const RowState<C>& state) {
  float sum = 0.f;
#pragma unroll
  for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
    for (int d = 0; d < C::kDimTiles; ++d) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sum = fmaf(state.output[r][d][i], 0.f, sum);
    }
  }
  return sum != 0.f;
}

}  // namespace flashonnx::tf32

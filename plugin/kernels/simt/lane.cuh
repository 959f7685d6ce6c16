// Which queries, keys and features a lane works on, and where P stands in shared memory.
#pragma once

#include "kernels/simt/config.h"
#include "kernels/simt/device.cuh"

namespace flashonnx::simt {

// A warp's 4 x 8 lanes are dealt out so that lanes l and l ^ 1 share a column and l and l ^ 2 a
// row: 16-byte loads of half a warp, 2 rows x 8 columns, then take one pass over the banks instead
// of two.
template <class C>
struct Lane {
  int warp_row, warp_column, row, column;

  __device__ __forceinline__ explicit Lane(int thread)
      : warp_row(thread / 32 / C::kColumnWarps),
        warp_column(thread / 32 % C::kColumnWarps),
        row((thread & 1) | ((thread & 16) >> 3)),
        column((thread >> 1) & 7) {}

  // Rows of the block's tile, keys of the tile, and first features of the lane's vectors of 4.
  __device__ __forceinline__ int query(int i) const {
    return 32 * warp_row + C::kLaneRows * i + row;
  }
  __device__ __forceinline__ int key(int j) const {
    return warp_column * (C::kBlockKeys / C::kColumnWarps) + column * C::kKeyVector + key_step(j);
  }
  static __device__ __forceinline__ constexpr int key_step(int j) {  // key(j) - key(0)
    return j / C::kKeyVector * C::kKeyVector * C::kLaneColumns + j % C::kKeyVector;
  }
  __device__ __forceinline__ int feature(int vector) const {
    return warp_column * C::kLaneColumns * C::kThreadColumns +
           4 * (C::kLaneColumns * vector + column);
  }
};

// Over the 8 lanes that share a row.
template <class Combine>
__device__ __forceinline__ float reduce_row(float x, Combine combine) {
#pragma unroll
  for (int distance = 2; distance <= 8; distance *= 2)
    x = combine(x, __shfl_xor_sync(0xffffffffu, x, distance));
  return x;
}

// P of the tile, swizzled so that the 4 rows a warp touches at once lie in different banks.
template <class C>
__device__ __forceinline__ int probability_column(int query, int key) {
  return 4 * ((key / 4) ^ (2 * (query & 3))) + key % 4;
}
template <class C>
__device__ __forceinline__ int probability_offset(int query, int key) {
  return query * C::kBlockKeys + probability_column<C>(query, key);
}

// Writes a lane's scores or probabilities to their places in P.
template <class C>
__device__ __forceinline__ void store_scores(const Lane<C>& lane,
                                             const float (&scores)[C::kThreadRows][C::kThreadKeys],
                                             float* probabilities) {
#pragma unroll
  for (int i = 0; i < C::kThreadRows; ++i) {
#pragma unroll
    for (int j = 0; j < C::kThreadKeys; j += C::kKeyVector) {
      float* to = probabilities + probability_offset<C>(lane.query(i), lane.key(j));
      if constexpr (C::kKeyVector == 4) {
        *reinterpret_cast<float4*>(to) =
            make_float4(scores[i][j], scores[i][j + 1], scores[i][j + 2], scores[i][j + 3]);
      } else if constexpr (C::kKeyVector == 2) {
        *reinterpret_cast<float2*>(to) = make_float2(scores[i][j], scores[i][j + 1]);
      } else {
        *to = scores[i][j];
      }
    }
  }
}

}  // namespace flashonnx::simt

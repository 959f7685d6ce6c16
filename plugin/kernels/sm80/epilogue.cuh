// From a warp's sums to the output: rows without a key, and stores.
#pragma once

#include "kernels/common/finish.cuh"
#include "kernels/sm80/mask.cuh"

namespace flashonnx::sm80 {

// The mean of the first `length` rows of V, for the whole block; `partial` holds kWarps rows of
// floats, the first becomes it.
template <class T, class C>
__device__ __forceinline__ void mean_of_values(const T* v, int64_t stride, int length, int dim,
                                               const Lane& lane, float* partial) {
  for (int d = lane.lane; d < dim; d += 32) {
    float sum = 0.f;
    for (int key = lane.warp; key < length; key += C::kWarps) sum += to_float(v[key * stride + d]);
    partial[lane.warp * C::kDim + d] = sum;
  }
  __syncthreads();
  for (int d = threadIdx.x; d < dim; d += C::kThreads) {
    float sum = 0.f;
    for (int w = 0; w < C::kWarps; ++w) sum += partial[w * C::kDim + d];
    partial[d] = __fdividef(sum, max(length, 1));
  }
  __syncthreads();
}

// Stores a warp's rows. In the common case they go through the warp's own rows of Q's tile, so that
// whole rows are written.
template <class T, class C>
__device__ __forceinline__ void store_rows(const Problem& p, const Plan& plan, const Lane& lane,
                                           int64_t at, int rows,
                                           const float (&output)[C::kRowTiles][C::kDimTiles][4],
                                           uint32_t staging) {
  using L = QueryLayout<C>;
  if (plan.o_vectors) {
#pragma unroll
    for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
      for (int d = 0; d < C::kDimTiles; ++d) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          store_shared(staging + L::offset(r * 16 + h * 8 + lane.row, d) + lane.quad * 4,
                       pack<T>(output[r][d][2 * h], output[r][d][2 * h + 1]));
        }
      }
    }
    __syncwarp();
    const int first_row = lane.lane / L::kGroup, first_chunk = lane.lane % L::kGroup;
    T* to = static_cast<T*>(p.o.data) + at + first_row * p.o.row + first_chunk * 8;
#pragma unroll
    for (int r = 0; r < C::kWarpQueries; r += 32 / L::kGroup) {
#pragma unroll
      for (int c = 0; c < L::kChunks; c += L::kGroup) {
        if (first_row + r < rows && (first_chunk + c) * 8 < p.value_dim) {
          *reinterpret_cast<uint4*>(to + c * 8) =
              load_shared(staging + L::offset(first_row + r, first_chunk + c));
        }
      }
      to += 32 / L::kGroup * p.o.row;
    }
    return;
  }
#pragma unroll
  for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = r * 16 + i / 2 * 8 + lane.row;
#pragma unroll
      for (int d = 0; d < C::kDimTiles; ++d) {
        const int feature = 8 * d + 2 * lane.quad + i % 2;
        if (row < rows && feature < p.value_dim)
          store_element(p, at + row * p.o.row + feature, output[r][d][i]);
      }
    }
  }
}

}  // namespace flashonnx::sm80

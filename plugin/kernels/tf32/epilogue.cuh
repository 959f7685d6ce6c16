// From a warp's sums to the output.
#pragma once

#include "kernels/common/finish.cuh"
#include "kernels/sm80/epilogue.cuh"
#include "kernels/tf32/load.cuh"

namespace flashonnx::tf32 {

// Stores a warp's rows, 4 features of each 16 a thread; where that cannot be done at once, by way
// of `staging`, the warp's own rows of Q's tile, in a loop that is short to compile.
template <class C>
__device__ __forceinline__ void store_rows(const Problem& p, const Plan& plan, const Lane& lane,
                                           int64_t at, int rows, const RowState<C>& state,
                                           float* staging) {
  float* const to = plan.o_vectors ? static_cast<float*>(p.o.data) + at : staging;
  const int64_t stride = plan.o_vectors ? p.o.row : C::kDim;
  const int dim = plan.o_vectors ? p.value_dim : C::kDim;
#pragma unroll
  for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = r * 16 + h * 8 + lane.row;
#pragma unroll
      for (int d = 0; d < C::kDimTiles; d += 2) {
        const int feature = 8 * d + 4 * lane.quad;
        const float (&a)[4] = state.output[r][d], (&b)[4] = state.output[r][d + 1];
        if (row < rows && feature < dim) {
          *reinterpret_cast<float4*>(to + row * stride + feature) =
              float4{a[2 * h], b[2 * h], a[2 * h + 1], b[2 * h + 1]};
        }
      }
    }
  }
  if (plan.o_vectors) return;
  __syncwarp();
#pragma unroll 1
  for (int row = 0; row < min(rows, C::kWarpQueries); ++row) {
#pragma unroll 1
    for (int d = lane.lane; d < p.value_dim; d += 32)
      store_element(p, at + row * p.o.row + d, staging[row * C::kDim + d]);
  }
}

// Rows that saw no key get the mean of V. Bit 4 i of an entry of `empty` is row i. Every thread of
// the block calls this.
template <class C>
__device__ __forceinline__ void store_means(const Problem& p, const Lane& lane, const Work& work,
                                            const uint32_t (&empty)[C::kRowTiles][2],
                                            float* scratch) {
  bool any = false;
#pragma unroll
  for (int r = 0; r < C::kRowTiles; ++r) any |= (empty[r][0] | empty[r][1]) != 0;
  if (!__syncthreads_or(any)) return;
  const float* v =
      static_cast<const float*>(p.v.data) + work.batch * p.v.batch + work.kv_head * p.v.head;
  sm80::mean_of_values<float, C>(v, p.v.row, key_length_of(p, work.batch), p.value_dim, lane,
                                 scratch);
#pragma unroll
  for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll 1
      for (uint32_t rows = empty[r][h] & 0x11111111u; rows != 0; rows &= rows - 1) {
        const int query =
            work.first_query + lane.warp * C::kWarpQueries + r * 16 + h * 8 + (__ffs(rows) - 1) / 4;
        const int64_t at = work.batch * p.o.batch + work.head * p.o.head + query * p.o.row;
        for (int d = lane.lane; d < p.value_dim; d += 32) store_element(p, at + d, scratch[d]);
      }
    }
  }
}

// Everything after the last key. `scratch`: Q's tile, of which every warp has read its own rows.
template <class C>
__device__ __forceinline__ void finish(const Problem& p, const Plan& plan, const Lane& lane,
                                       RowState<C>& state, float* scratch) {
  const Work work = work_of<C>(plan, sm80::block_index());
  const int first = work.first_query + lane.warp * C::kWarpQueries;
  uint32_t empty[C::kRowTiles][2];
#pragma unroll
  for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float sum = quad_sum(state.sum[r][h]);
      const float scale = normaliser(p, work.head, state.maximum[r][h], sum);
#pragma unroll
      for (int d = 0; d < C::kDimTiles; ++d) {
        state.output[r][d][2 * h] *= scale;
        state.output[r][d][2 * h + 1] *= scale;
      }
      const int query = first + r * 16 + h * 8 + lane.row;
      empty[r][h] = __ballot_sync(0xffffffffu, sum == 0.f && query < p.q_length);
      if (p.lse.data && lane.quad == 0 && query < p.q_length) {
        float* lse = static_cast<float*>(p.lse.data) + work.batch * p.lse.batch +
                     work.head * p.lse.head + query * p.lse.row;
        *lse = natural_lse(p, state.maximum[r][h], sum);
      }
    }
  }
  const int64_t at = work.batch * p.o.batch + work.head * p.o.head + first * p.o.row;
  store_rows<C>(p, plan, lane, at, p.q_length - first, state,
                scratch + lane.warp * C::kWarpQueries * C::kDim);
  if (p.empty_row_mean) store_means<C>(p, lane, work, empty, scratch);
}

}  // namespace flashonnx::tf32

// Tiles of Q, K and V in shared memory, without bank conflicts for copies, ldmatrix and the reads
// of V.
#pragma once

#include "kernels/sm80/softmax.cuh"
#include "kernels/tf32/config.h"

namespace flashonnx::tf32 {

using sm80::copy_async, sm80::copy_wait;
using sm80::Lane, sm80::RowState, sm80::Scores;

// A row holds kDim floats in chunks of 16 bytes; chunk c stands at c ^ swizzle(row). ldmatrix, with
// floats for its pairs of elements, reads a chunk of 8 rows at once: 4 pairs of rows, kRun apart.
// Half a warp reads halves of two chunks of 4 rows, kRun apart, of V. For Q, kRun is 2: rows in
// order. Keys are dealt out in runs as sm80 does.
template <int kDim, int kRun>
struct Layout {
  static constexpr int kRowBytes = kDim * 4;
  static constexpr int kChunks = kDim / 4;
  static_assert(kChunks % 8 == 0);

  static __host__ __device__ constexpr int swizzle(int row) {
    return (row / kRun * 2 + row % 2) % 8;
  }
  static __device__ __forceinline__ uint32_t offset(int row, int chunk) {
    return row * kRowBytes + (chunk ^ swizzle(row)) * 16;
  }
  // The address of chunk `chunk` + c, for a constant multiple of 2 or 4, when `address` is that of
  // a chunk c below 2 or 4.
  static __device__ __forceinline__ uint32_t advance(uint32_t address, int chunk) {
    return (address ^ (chunk % 8 * 16)) + chunk / 8 * 128;
  }
};

template <class C>
using QueryLayout = Layout<C::kDim, 2>;
template <class C>
using KeyLayout = Layout<C::kDim, C::kRun>;

// Copies kRows rows of `dim` floats from `source`, `stride` floats apart; rows from `rows` on and
// features from `dim` on are not read and become zeros. Unless `vectors` (rows begin at multiples
// of 16 bytes), floats are read one by one.
template <class C, class L, int kRows>
__device__ __forceinline__ void load_tile(uint32_t shared, const float* source, int64_t stride,
                                          int rows, int dim, bool vectors) {
  constexpr int kStep = C::kThreads / 8;  // rows that the block copies at a time
  // Steps of rows then only change bits of the swizzle in which no first row differs from 0.
  static_assert(kRows % kStep == 0 && kStep % 8 == 0);
  const int first_row = threadIdx.x / 8;
  const int first_chunk = threadIdx.x % 8;
  const float* from = source + first_row * stride + first_chunk * 4;
  const uint32_t to = shared + L::offset(first_row, first_chunk);
  if (vectors && rows >= kRows && dim == C::kDim) {
#pragma unroll
    for (int r = 0; r < kRows; r += kStep) {
#pragma unroll
      for (int c = 0; c < L::kChunks; c += 8)
        copy_async((to ^ L::swizzle(r) * 16) + r * L::kRowBytes + c * 16, from + c * 4);
      from += kStep * stride;
    }
    return;
  }
#pragma unroll 1
  for (int r = 0; r < kRows; r += kStep) {
#pragma unroll
    for (int c = 0; c < L::kChunks; c += 8) {
      const int valid = first_row + r < rows ? max(min(dim - (first_chunk + c) * 4, 4), 0) : 0;
      const uint32_t target = shared + L::offset(first_row + r, first_chunk + c);
      if (vectors && valid % 4 == 0) {  // a row's last floats may be the allocation's
        copy_async(target, valid > 0 ? from + c * 4 : source, valid * 4);
      } else {
        const uint32_t* floats = reinterpret_cast<const uint32_t*>(from + c * 4);
        uint4 x = {0, 0, 0, 0};
        if (valid > 0) x.x = floats[0];
        if (valid > 1) x.y = floats[1];
        if (valid > 2) x.z = floats[2];
        if (valid > 3) x.w = floats[3];
        store_shared(target, x);
      }
    }
    from += kStep * stride;
  }
}

}  // namespace flashonnx::tf32

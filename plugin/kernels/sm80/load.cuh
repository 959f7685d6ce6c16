// Tiles of Q, K and V in shared memory, without bank conflicts for copies, ldmatrix and its
// transposed form.
#pragma once

#include "kernels/sm80/config.h"
#include "kernels/sm80/mma.cuh"

namespace flashonnx::sm80 {

// A row holds kDim elements in chunks of 16 bytes. ldmatrix reads a chunk of 8 rows at once: 4
// pairs of rows, kRun apart. Chunk c stands at c ^ swizzle(row), so that these lie in 8 different
// places modulo 128 bytes. Rows of 64 or 192 bytes are an odd multiple of half the banks, so 4
// places suffice there.
//
// For Q, kRun is 2: 8 rows in order. Keys are dealt out in runs: each of the 4 threads that share a
// row of scores has the keys of one run, 2 n and 2 n + 1 of it in accumulator n. Its part of a
// mask's row then is contiguous.
template <int kDim, int kRun>
struct Layout {
  static constexpr int kChunks = kDim / 8;
  static constexpr int kGroup = kDim % 64 == 0 ? 8 : 4;  // chunks among which a row permutes
  static_assert(kChunks % kGroup == 0);

  static __host__ __device__ constexpr int swizzle(int row) {
    return kGroup == 8 ? (row / kRun * 2 + row % 2) % 8 : row / kRun % 4;
  }
  static __device__ __forceinline__ uint32_t offset(int row, int chunk) {
    return (row * kChunks + (chunk ^ swizzle(row))) * 16;
  }
  // The address of chunk `chunk` + c, for an even constant `chunk`, when `address` is that of chunk
  // c = 0 or 1 of the row.
  static __device__ __forceinline__ uint32_t advance(uint32_t address, int chunk) {
    return (address ^ (chunk % kGroup * 16)) + chunk / kGroup * kGroup * 16;
  }
};

template <class C>
using QueryLayout = Layout<C::kDim, 2>;
template <class C>
using KeyLayout = Layout<C::kDim, C::kRun>;

// Eight elements, zeros from `valid` on.
template <class T>
__device__ __forceinline__ uint4 load_elements(const T* from, int valid) {
  const uint16_t* elements = reinterpret_cast<const uint16_t*>(from);
  uint32_t pairs[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const uint32_t low = 2 * e < valid ? elements[2 * e] : 0;
    const uint32_t high = 2 * e + 1 < valid ? elements[2 * e + 1] : 0;
    pairs[e] = low | high << 16;
  }
  return {pairs[0], pairs[1], pairs[2], pairs[3]};
}

// Copies kRows rows of `dim` elements from `source`, `stride` elements apart; rows from `rows` on
// and features from `dim` on are not read and become zeros. Unless `vectors` (rows begin at
// multiples of 16 bytes), elements are read one by one.
template <class C, class L, int kRows, class T>
__device__ __forceinline__ void load_tile(uint32_t shared, const T* source, int64_t stride,
                                          int rows, int dim, bool vectors) {
  constexpr int kStep = C::kThreads / L::kGroup;  // rows that the block copies at a time
  // Steps of rows then only change bits of the swizzle in which no first row differs from 0.
  static_assert(kRows % kStep == 0 && kStep % 8 == 0);
  const int first_row = threadIdx.x / L::kGroup;
  const int first_chunk = threadIdx.x % L::kGroup;
  const T* from = source + first_row * stride + first_chunk * 8;
  const uint32_t to = shared + L::offset(first_row, first_chunk);
  if (vectors && rows >= kRows && dim == C::kDim) {
#pragma unroll
    for (int r = 0; r < kRows; r += kStep) {
#pragma unroll
      for (int c = 0; c < L::kChunks; c += L::kGroup)
        copy_async((to ^ L::swizzle(r) * 16) + (r * L::kChunks + c) * 16, from + c * 8);
      from += kStep * stride;
    }
    return;
  }
#pragma unroll 1
  for (int r = 0; r < kRows; r += kStep) {
#pragma unroll
    for (int c = 0; c < L::kChunks; c += L::kGroup) {
      const int valid = first_row + r < rows ? max(min(dim - (first_chunk + c) * 8, 8), 0) : 0;
      const uint32_t target = shared + L::offset(first_row + r, first_chunk + c);
      if (vectors && valid % 8 == 0) {  // a row's last elements may be the allocation's
        copy_async(target, valid > 0 ? from + c * 8 : source, valid * 2);
      } else {
        store_shared(target, load_elements(from + c * 8, valid));
      }
    }
    from += kStep * stride;
  }
}

}  // namespace flashonnx::sm80

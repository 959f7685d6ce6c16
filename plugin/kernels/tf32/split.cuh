// Products of float32 matrices on tensor cores that take TF32, which has float32's range and 11 of
// its 24 bits.
//
// x is split into high + low, both TF32 but for low's last bit. Of the four products of two split
// numbers, low * low is below float32's last bit and is left out. Tensor cores add what they
// multiply to the accumulator and cut the sum off, always towards zero, where float32 arithmetic
// rounds: a bias that grows with the number of additions. So the two small products have
// accumulators of their own, in which that does not matter, and chains of large ones are short.
#pragma once

#include "kernels/sm80/mma.cuh"

namespace flashonnx::tf32 {

// high is rounded, so that low's sign is any and what is left out has no bias. An infinity or NaN
// has a low of NaN; so has what rounds up to infinity, or it is infinite: no number comes out of a
// product with any of these, and careful.cuh takes over.
__device__ __forceinline__ void split(float x, uint32_t& high, uint32_t& low) {
  high = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
  low = __float_as_uint(x - __uint_as_float(high));
}

template <int kCount>
struct Split {
  uint32_t high[kCount], low[kCount];

  __device__ __forceinline__ void set(int i, float x) { split(x, high[i], low[i]); }
};

// c (16 x 8) += a (16 x 8) b (8 x 8).
__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two 8 x 8 operands at b[0, 1] and b[2, 3], each with all row tiles: `large` and `small` + small
// products. Neighbouring instructions have different accumulators.
template <int kRowTiles, class Large, class Small>
__device__ __forceinline__ void multiply(Large&& large, Small&& small,
                                         const Split<4> (&a)[kRowTiles], const Split<4>& b) {
#pragma unroll
  for (int t = 0; t < 2; ++t) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r)
      multiply(small(r, t), a[r].high, b.low[2 * t], b.low[2 * t + 1]);
  }
#pragma unroll
  for (int t = 0; t < 2; ++t) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r)
      multiply(large(r, t), a[r].high, b.high[2 * t], b.high[2 * t + 1]);
  }
#pragma unroll
  for (int t = 0; t < 2; ++t) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r)
      multiply(small(r, t), a[r].low, b.high[2 * t], b.high[2 * t + 1]);
  }
}

}  // namespace flashonnx::tf32

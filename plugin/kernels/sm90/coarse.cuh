// Huge scores, of rows that see no key without a huge bias.
#pragma once

#include <cmath>
#include <cstdint>

namespace flashonnx::sm90 {

// In powers of 2. The tensor cores' sum of such a bias and Q K^T is not rounded to the nearest: it
// depends on the sign of what is otherwise lost, and keys that are equals would not be.
constexpr float kHuge = 1 << 20;

// A score, or a bias in its unit, with 8 bits.
__device__ __forceinline__ float coarse(float x) {
  return __uint_as_float((__float_as_uint(x) + 0x8000u) & 0xffff0000u);
}
// As well if it is huge; times the factor it is a power of 2.
__device__ __forceinline__ float coarse(float x, float factor) {
  return fabsf(x * factor) > kHuge && fabsf(x) < INFINITY ? coarse(x) : x;
}

// Whether a row's largest bias is so large, in powers of 2, that scores do not count beside it, as
// where a row is finfo.min throughout: keys that have it are equals.
__device__ __forceinline__ bool is_level(float top) {
  return fabsf(top) > 0x1p53f && fabsf(top) < INFINITY;
}

}  // namespace flashonnx::sm90

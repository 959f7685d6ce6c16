// What a mask and a soft cap do to scores, which are in powers of 2 here (natural ones times log2
// e).
#pragma once

#include <cfloat>

#include "flashonnx/attention.h"
#include "kernels/common/arithmetic.cuh"
#include "kernels/common/plan.h"

namespace flashonnx {

// Finite biases are bounded so that their sum with a score stays finite: a row of the most negative
// floats is then a row of equals, not an empty one.
constexpr float kLargestBias = FLT_MAX / 2;

// What an element of the mask adds to a score: 0 or -infinity from a boolean one. Finite ones stay
// finite.
__device__ __forceinline__ float mask_bias(float x) {
  return fmaxf(x * kLog2e, x >= -FLT_MAX ? -kLargestBias : x);
}
__device__ __forceinline__ float mask_bias(__nv_bfloat16 x) {
  return mask_bias(__bfloat162float(x));
}
__device__ __forceinline__ float mask_bias(__half x) { return __half2float(x) * kLog2e; }
__device__ __forceinline__ float mask_bias(int8_t x) { return x ? 0.f : -INFINITY; }
__device__ __forceinline__ float mask_bias(int32_t x) { return x ? 0.f : -INFINITY; }

// The bits of an element, and what it adds: apart, so that a load need not be waited for at once.
__device__ __forceinline__ uint32_t mask_bits(const char* element, int bytes) {
  if (bytes == 4) return *reinterpret_cast<const uint32_t*>(element);
  if (bytes == 2) return *reinterpret_cast<const uint16_t*>(element);
  return *reinterpret_cast<const uint8_t*>(element);
}
__device__ __forceinline__ float mask_bias(uint32_t bits, int dtype) {
  const float half = __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
  const float wide = __uint_as_float(dtype == FLASHONNX_BFLOAT16 ? bits << 16 : bits);
  const float additive = mask_bias(dtype == FLASHONNX_FLOAT16 ? half : wide);
  const bool boolean =
      dtype == FLASHONNX_BOOL || dtype == FLASHONNX_INT8 || dtype == FLASHONNX_INT32;
  return boolean ? mask_bias(static_cast<int32_t>(bits)) : additive;
}

// An element of a mask that is there, by its indices.
__device__ __forceinline__ const char* mask_element(const Problem& p, const Plan& plan,
                                                    int64_t batch, int64_t head, int64_t query,
                                                    int64_t key) {
  return static_cast<const char*>(p.mask.data) +
         (batch * p.mask.batch + head * p.mask.head + query * p.mask.row + key * p.mask_key) *
             plan.mask_bytes;
}

// tanh to a relative error of a few 1e-6: the exponential form loses small arguments, the series
// has them.
__device__ __forceinline__ float tanh_approximate(float x) {
  const float square = x * x;
  const float series = x * fmaf(square, fmaf(square, 2.f / 15.f, -1.f / 3.f), 1.f);
  const float exponential = 1.f - __fdividef(2.f, 1.f + exp2_approximate(2.f * kLog2e * x));
  return fabsf(x) < 0.05f ? series : exponential;
}

}  // namespace flashonnx

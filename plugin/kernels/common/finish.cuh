// From a row's sums to what is written: normalisation with a sink, lse, and single elements.
#pragma once

#include "kernels/common/bias.cuh"

namespace flashonnx {

constexpr float kLn2 = 0.6931471805599453f;

// The most negative finite number that the mask can hold.
__device__ __forceinline__ float lowest_bias(const Problem& p) {
  return p.mask_dtype == FLASHONNX_BFLOAT16 ? __uint_as_float(0xff7f0000u) : -FLT_MAX;
}

// A row whose best score is at the biases' bound was filled with that number, beside which scores
// count for nothing.
__device__ __forceinline__ float natural_lse(const Problem& p, float maximum, float sum) {
  if (sum == 0.f) return -INFINITY;
  const float lse = kLn2 * (maximum + __log2f(sum));
  return maximum <= -kLargestBias && lse == lse ? lowest_bias(p) : lse;
}

// What a row's sum of P V is multiplied by; 0 for a row without keys.
__device__ __forceinline__ float normaliser(const Problem& p, int64_t head, float maximum,
                                            float sum) {
  if (sum == 0.f) return 0.f;
  if (!p.sinks) return __fdividef(1.f, sum);
  const float sink = p.sinks[head * p.sinks_stride] * kLog2e;
  const float top = fmaxf(maximum, sink);
  const float keep = exp2_approximate(maximum - top);
  return __fdividef(keep, sum * keep + exp2_approximate(sink - top));
}

__device__ __forceinline__ void store_element(const Problem& p, int64_t at, float x) {
  if (p.output_dtype == FLASHONNX_FLOAT32) {
    static_cast<float*>(p.o.data)[at] = x;
  } else if (p.output_dtype == FLASHONNX_FLOAT16) {
    static_cast<__half*>(p.o.data)[at] = __float2half_rn(x);
  } else {
    static_cast<__nv_bfloat16*>(p.o.data)[at] = __float2bfloat16_rn(x);
  }
}

}  // namespace flashonnx

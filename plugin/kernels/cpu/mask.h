// The mask input as rows of biases: 0 or -inf from a boolean mask, the values of an additive one.
#pragma once

#include "simd.h"
#include "task.h"

namespace flashonnx::cpu::FLASHONNX_CPU_ISA {

inline int64_t mask_bytes(int32_t dtype) {
  if (dtype == FLASHONNX_FLOAT32 || dtype == FLASHONNX_INT32) return 4;
  return dtype == FLASHONNX_FLOAT16 || dtype == FLASHONNX_BFLOAT16 ? 2 : 1;
}

template <typename T>
void read_booleans(const char* source, int64_t stride, int count, float* target) {
  const T* keep = reinterpret_cast<const T*>(source);
  if (stride == 1) {  // vectorised
    for (int n = 0; n < count; ++n) target[n] = keep[n] != 0 ? 0.0f : -kInfinity;
  } else {
    for (int n = 0; n < count; ++n) target[n] = keep[n * stride] != 0 ? 0.0f : -kInfinity;
  }
}

template <typename T>
void read_biases(const char* source, int64_t stride, int count, float* target) {
  const T* bias = reinterpret_cast<const T*>(source);
  for (int n = 0; n < count; n += kWidth) {
    if (stride == 1) {
      store(target + n, load_upto(bias + n, count - n));
    } else {
      T part[kWidth] = {};
      for (int i = 0; i < kWidth && n + i < count; ++i) part[i] = bias[(n + i) * stride];
      store(target + n, load(part));
    }
  }
}

// Reads the biases of `count` keys, the first at `source`. Some of the next whole vector of
// `target` may be overwritten.
inline void read_mask(const flashonnx_tensor& mask, const char* source, int count, float* target) {
  const int64_t stride = mask.stride[3];
  switch (mask.dtype) {
    case FLASHONNX_FLOAT32:
      return read_biases<float>(source, stride, count, target);
    case FLASHONNX_FLOAT16:
      return read_biases<Half>(source, stride, count, target);
    case FLASHONNX_BFLOAT16:
      return read_biases<BFloat16>(source, stride, count, target);
    case FLASHONNX_INT32:
      return read_booleans<int32_t>(source, stride, count, target);
    default:
      return read_booleans<uint8_t>(source, stride, count, target);
  }
}

inline bool all_equal(const float* values, int count, float value) {
  bool equal = true;
  for (int n = 0; n < count; ++n) equal &= values[n] == value;
  return equal;
}

}  // namespace flashonnx::cpu::FLASHONNX_CPU_ISA

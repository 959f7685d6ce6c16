// The mask input as rows of biases: 0 or -inf from a boolean mask, the values of an additive one.
#pragma once

#include "pack.h"

namespace flashonnx::cpu::FLASHONNX_CPU_ISA {

// The biases of one row of the mask for the current key tile. Consecutive rows often share it (a padding mask, heads).
struct BiasRow {
  const char* source = nullptr;
  bool neutral = false;  // all 0
  bool masked = false;   // all -inf
  float* values = nullptr;
};

inline int64_t mask_bytes(int32_t dtype) {
  if (dtype == FLASHONNX_FLOAT32 || dtype == FLASHONNX_INT32) return 4;
  return dtype == FLASHONNX_FLOAT16 || dtype == FLASHONNX_BFLOAT16 ? 2 : 1;
}

template <typename T>
void read_boolean(const void* source, int64_t stride, int begin, int end, float* target) {
  const T* keep = static_cast<const T*>(source);
  if (stride == 1) {
    for (int n = begin; n < end; ++n) target[n] = keep[n] != 0 ? 0.0f : -kInfinity;
  } else {
    for (int n = begin; n < end; ++n) target[n] = keep[n * stride] != 0 ? 0.0f : -kInfinity;
  }
}

template <typename T>
void read_bias(const void* source, int64_t stride, int begin, int end, float* target) {
  const T* bias = static_cast<const T*>(source);
  if (stride == 1) {
    for (int n = begin; n < end; n += kWidth) store(target + n, load_upto(bias + n, end - n));
    return;
  }
  for (int n = begin; n < end; n += kWidth) {
    T part[kWidth] = {};
    for (int i = 0; i < kWidth && n + i < end; ++i) part[i] = bias[(n + i) * stride];
    store(target + n, load(part));
  }
}

// Reads keys [begin, end) of the tile whose first key's mask element is at `source`; begin is a multiple of kPanel.
inline void read_mask(BiasRow& row, const flashonnx_tensor& mask, const char* source, int begin, int end) {
  if (row.source == source) return;
  row.source = source;
  const int64_t stride = mask.stride[3];
  switch (mask.dtype) {
    case FLASHONNX_FLOAT32: read_bias<float>(source, stride, begin, end, row.values); break;
    case FLASHONNX_FLOAT16: read_bias<Half>(source, stride, begin, end, row.values); break;
    case FLASHONNX_BFLOAT16: read_bias<BFloat16>(source, stride, begin, end, row.values); break;
    case FLASHONNX_INT32: read_boolean<int32_t>(source, stride, begin, end, row.values); break;
    default: read_boolean<uint8_t>(source, stride, begin, end, row.values); break;
  }
  bool neutral = true;
  bool masked = true;
  for (int n = begin; n < end; ++n) {
    neutral &= row.values[n] == 0;
    masked &= row.values[n] == -kInfinity;
  }
  row.neutral = neutral;
  row.masked = masked;
}

// Adds biases to scores. Only a bias of exactly -inf masks: it wins over whatever stands in the score, and a sum of finite numbers that
// overflows stays finite, so that a row of finfo.min everywhere still has keys.
inline void add_bias(float* scores, const float* bias, int begin, int end) {
  for (int n = begin; n < end; n += kWidth) {
    const Vec b = load(bias + n);
    Vec sum = load(scores + n) + b;
    sum = sum < -FLT_MAX ? Vec{} - FLT_MAX : sum;
    store(scores + n, b == -kInfinity ? Vec{} - kInfinity : sum);
  }
}

}  // namespace flashonnx::cpu::FLASHONNX_CPU_ISA

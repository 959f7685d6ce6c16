// Copies of tiles in the order in which the micro-kernels read them, in float32 whatever the inputs are.
#pragma once

#include "gemm.h"
#include "task.h"

namespace flashonnx::cpu::FLASHONNX_CPU_ISA {

template <typename T>
FLASHONNX_INLINE Vec load_upto(const T* p, int64_t count) {
  return count >= kWidth ? load(p) : load_part(p, static_cast<int>(count));
}

// One row of Q times scale.
template <typename T>
void pack_query(const T* source, int64_t dim, float scale, float* target) {
  for (int64_t d = 0; d < dim; d += kWidth) {
    store(target + d, load_upto(source + d, dim - d) * scale);
  }
}

// Keys [begin, end) of a tile, transposed: panel n / kPanel holds dim x kPanel. The last panel is filled up with zeros.
template <typename T>
void pack_keys(const T* source, int64_t stride, int64_t dim, int begin, int end, float* target) {
  for (int first = begin; first < end; first += kWidth) {
    float* panel = target + first / kPanel * kPanel * dim + first % kPanel;
    for (int64_t d = 0; d < dim; d += kWidth) {
      Vec block[kWidth];
#pragma GCC unroll 16
      for (int n = 0; n < kWidth; ++n) {
        block[n] = first + n < end ? load_upto(source + (first + n) * stride + d, dim - d) : Vec{};
      }
      transpose(block);
      const int64_t count = dim - d < kWidth ? dim - d : kWidth;
      for (int64_t i = 0; i < count; ++i) store(panel + (d + i) * kPanel, block[i]);
    }
  }
}

// Values [begin, end) of a tile: panel d / kPanel holds kKeyTile x kPanel. Answers whether all are finite.
template <typename T>
bool pack_values(const T* source, int64_t stride, int64_t dim, int begin, int end, float* target) {
  Vec zero{};  // stays 0 until an Inf or NaN comes: 0 * Inf = NaN
  for (int n = begin; n < end; ++n) {
    for (int64_t d = 0; d < dim; d += kWidth) {
      const Vec x = load_upto(source + n * stride + d, dim - d);
      zero += x * 0.0f;
      store(target + d / kPanel * kKeyTile * kPanel + n * kPanel + d % kPanel, x);
    }
  }
  return !any(zero != zero);
}

}  // namespace flashonnx::cpu::FLASHONNX_CPU_ISA

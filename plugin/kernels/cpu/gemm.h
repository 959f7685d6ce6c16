// A register-blocked product of a few rows of A by a packed panel of B: the inner loop of both
// products of attention.
#pragma once

#include "simd.h"

namespace flashonnx::cpu::FLASHONNX_CPU_ISA {

constexpr int kPanel = 2 * kWidth;  // columns of a panel
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kAccumulators = 24;  // of 32 registers
#else
constexpr int kAccumulators =
    12;  // of 16 registers: 2 a cycle hide the FMA's latency of 4, the rest saves loads
#endif

struct Product {
  const float* a;  // rows x depth
  int64_t lda;
  const float* b;  // depth x kPanel
  int64_t depth;
  float* c;  // rows x kPanel
  int64_t ldc;
  const float* rescale;  // C = rescale[row] * C + A B; null: C = A B
};

template <int kRows, int kVectors>
void multiply(const Product& product) {
  const float* a = product.a;
  const float* b = product.b;
  const int64_t lda = product.lda;
  Vec sum[kRows][kVectors];
#pragma GCC unroll 24
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      sum[r][v] = product.rescale == nullptr
                      ? Vec{}
                      : load(product.c + r * product.ldc + v * kWidth) * product.rescale[r];
    }
  }
  for (int64_t k = 0; k < product.depth; ++k) {
    Vec columns[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) columns[v] = load(b + k * kPanel + v * kWidth);
#pragma GCC unroll 24
    for (int r = 0; r < kRows; ++r) {
      const Vec x = broadcast(a[r * lda + k]);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sum[r][v] += x * columns[v];
    }
  }
#pragma GCC unroll 24
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) store(product.c + r * product.ldc + v * kWidth, sum[r][v]);
  }
}

using Multiply = void (*)(const Product&);

template <int kVectors, int... kRows>
FLASHONNX_INLINE Multiply multiply_for(int rows, Lanes<kRows...>) {
  static constexpr Multiply kTable[] = {multiply<kRows + 1, kVectors>...};
  return kTable[rows - 1];
}

// Any number of rows in steps as even as can be: a step of one or two rows would wait for its own
// sums.
template <int kVectors>
void multiply_rows(Product product, int rows) {
  constexpr int kStep = kAccumulators / kVectors;
  for (int steps = (rows + kStep - 1) / kStep; steps > 0; --steps) {
    const int count = (rows + steps - 1) / steps;
    multiply_for<kVectors>(count, std::make_integer_sequence<int, kStep>{})(product);
    rows -= count;
    product.a += count * product.lda;
    product.c += count * product.ldc;
    if (product.rescale != nullptr) product.rescale += count;
  }
}

// The first `columns` of a panel, up to the next whole vector.
inline void multiply_panel(const Product& product, int rows, int64_t columns) {
  columns > kWidth ? multiply_rows<2>(product, rows) : multiply_rows<1>(product, rows);
}

}  // namespace flashonnx::cpu::FLASHONNX_CPU_ISA

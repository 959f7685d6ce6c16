// The two products of attention as register-blocked micro-kernels: rows of A by a packed panel of B.
#pragma once

#include "simd.h"

namespace flashonnx::cpu::FLASHONNX_CPU_ISA {

constexpr int kPanel = 2 * kWidth;  // columns of a panel
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kStep = 12;  // rows of the micro-kernel: 24 accumulators of 32 registers
#else
constexpr int kStep = 6;   // 12 accumulators of 16 registers: enough to hide the FMA's latency
#endif

// How a block of rows meets a run of columns.
struct Product {
  const float* a;  // rows x depth
  int64_t lda;
  const float* b;  // one panel: depth x kPanel
  int64_t depth;
  float* c;        // rows x kPanel
  int64_t ldc;
  const float* rescale;  // null: C = A B; else C = rescale[row] * C + A B
};

template <int kRows, int kVectors>
void multiply(const Product& product) {
  const float* a = product.a;
  const float* b = product.b;
  const int64_t lda = product.lda;
  Vec sum[kRows][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      sum[r][v] = product.rescale == nullptr
                      ? Vec{}
                      : load(product.c + r * product.ldc + v * kWidth) * product.rescale[r];
    }
  }
  for (int64_t k = 0; k < product.depth; ++k) {
    Vec column[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) column[v] = load(b + k * kPanel + v * kWidth);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Vec x = broadcast(a[r * lda + k]);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sum[r][v] += x * column[v];
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) store(product.c + r * product.ldc + v * kWidth, sum[r][v]);
  }
}

template <int kRows>
void multiply_rows(const Product& product, int rows, int vectors) {
  if (rows == kRows) {
    vectors == 2 ? multiply<kRows, 2>(product) : multiply<kRows, 1>(product);
  } else if constexpr (kRows > 1) {
    multiply_rows<kRows - 1>(product, rows, vectors);
  }
}

// Any number of rows by `columns` of a panel; columns up to the next whole vector are written too.
inline void multiply_panel(Product product, int rows, int columns) {
  const int vectors = columns > kWidth ? 2 : 1;
  for (int row = 0; row < rows; row += kStep) {
    multiply_rows<kStep>(product, rows - row < kStep ? rows - row : kStep, vectors);
    product.a += kStep * product.lda;
    product.c += kStep * product.ldc;
    if (product.rescale != nullptr) product.rescale += kStep;
  }
}

}  // namespace flashonnx::cpu::FLASHONNX_CPU_ISA

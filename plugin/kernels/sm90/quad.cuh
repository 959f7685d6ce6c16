// The four threads of a quad hold neighbouring columns of an accumulator's row.
#pragma once

#include <cstdint>

namespace flashonnx::sm90 {

// Transposes 4 x 4 registers over the four threads of a quad: x[j] of thread i becomes x[i] of
// thread j.
__device__ __forceinline__ void transpose_in_quad(int quad, uint32_t (&x)[4]) {
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j & bit) continue;
      const uint32_t got = __shfl_xor_sync(0xffffffffu, quad & bit ? x[j] : x[j | bit], bit);
      (quad & bit ? x[j] : x[j | bit]) = got;
    }
  }
}

}  // namespace flashonnx::sm90

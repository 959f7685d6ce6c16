// Rotary position embedding of one row.
#pragma once

#include "simd.h"
#include "task.h"

namespace flashonnx::cpu::FLASHONNX_CPU_ISA {

template <typename T>
void read_row(const T* source, int64_t count, float* target) {
  for (int64_t d = 0; d < count; d += kWidth) store(target + d, load_upto(source + d, count - d));
}

template <typename T>
void write_row(const float* source, int64_t count, T* target) {
  int64_t d = 0;
  for (; d + kWidth <= count; d += kWidth) store(target + d, load(source + d));
  if (d < count) store_part(target + d, load(source + d), static_cast<int>(count - d));
}

inline void read_table(const void* source, int32_t dtype, int64_t count, float* target) {
  switch (dtype) {
    case FLASHONNX_FLOAT16:
      return read_row(static_cast<const Half*>(source), count, target);
    case FLASHONNX_BFLOAT16:
      return read_row(static_cast<const BFloat16*>(source), count, target);
    default:
      return read_row(static_cast<const float*>(source), count, target);
  }
}

template <typename T>
void rotate_as(const Rotation& job) {
  float x[kMaxHeadDim + kPad], cos[kMaxHeadDim / 2 + kPad], sin[kMaxHeadDim / 2 + kPad];
  const int64_t half = job.rotary_dim / 2;
  read_row(static_cast<const T*>(job.source), job.head_dim, x);
  read_table(job.cos, job.table_dtype, half, cos);
  read_table(job.sin, job.table_dtype, half, sin);
  // Features 2 d and 2 d + 1 are a pair, or d and d + half.
  const int64_t step = job.interleaved ? 2 : 1, mate = job.interleaved ? 1 : half;
  for (int64_t d = 0; d < half; ++d) {
    const float a = x[d * step], b = x[d * step + mate];
    x[d * step] = a * cos[d] - b * sin[d];
    x[d * step + mate] = b * cos[d] + a * sin[d];
  }
  write_row(x, job.head_dim, static_cast<T*>(job.target));
}

void rotate(const Rotation& job) {
  switch (job.dtype) {
    case FLASHONNX_FLOAT16:
      return rotate_as<Half>(job);
    case FLASHONNX_BFLOAT16:
      return rotate_as<BFloat16>(job);
    default:
      return rotate_as<float>(job);
  }
}

}  // namespace flashonnx::cpu::FLASHONNX_CPU_ISA

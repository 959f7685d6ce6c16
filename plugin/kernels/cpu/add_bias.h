// A bias added to one row.
#pragma once

#include "rotary.h"

namespace flashonnx::cpu::FLASHONNX_CPU_ISA {

template <typename T>
void add_as(const void* row, const void* bias, int64_t count, void* sum) {
  const T* const x = static_cast<const T*>(row);
  const T* const y = static_cast<const T*>(bias);
  T* const to = static_cast<T*>(sum);
  int64_t d = 0;
  for (; d + kWidth <= count; d += kWidth)
    store(to + d, load_upto(x + d, kWidth) + load_upto(y + d, kWidth));
  if (d < count) {
    store_part(to + d, load_upto(x + d, count - d) + load_upto(y + d, count - d),
               static_cast<int>(count - d));
  }
}

void add_row(int32_t dtype, const void* row, const void* bias, int64_t count, void* sum) {
  switch (dtype) {
    case FLASHONNX_FLOAT16:
      return add_as<Half>(row, bias, count, sum);
    case FLASHONNX_BFLOAT16:
      return add_as<BFloat16>(row, bias, count, sum);
    default:
      return add_as<float>(row, bias, count, sum);
  }
}

}  // namespace flashonnx::cpu::FLASHONNX_CPU_ISA

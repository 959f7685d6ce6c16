// Division without a division.
#pragma once

#include <cstdint>

#include "kernels/common/inline.h"

namespace flashonnx {

// Division of numbers below 2^31 by one number: a block starts with four, and hardware has none.
struct Divider {
  uint32_t divisor, multiplier, shift;

  Divider() = default;
  explicit Divider(uint32_t divisor) : divisor(divisor), multiplier(0), shift(0) {
    while (int64_t{1} << shift < divisor) ++shift;
    // multiplier = ceil(2^(31 + shift) / divisor) < 2^32 for any divisor but 1
    if (divisor > 1)
      multiplier = static_cast<uint32_t>(((uint64_t{1} << (31 + shift)) + divisor - 1) / divisor);
  }
  FLASHONNX_HOST_DEVICE uint32_t quotient(uint32_t x) const {
    const uint32_t high = static_cast<uint32_t>(uint64_t{x} * multiplier >> 32);
    return divisor == 1 ? x : high >> (shift - 1);
  }
  FLASHONNX_HOST_DEVICE uint32_t rest(uint32_t x) const { return x - quotient(x) * divisor; }
};

}  // namespace flashonnx

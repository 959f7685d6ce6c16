// The kernels of one tiling: parts of a unit for each block or equal shares, for both element
// types.
#pragma once

#include "kernels/decode/kernel.cuh"
#include "kernels/decode/launch.h"
#include "kernels/decode/shares.cuh"

namespace flashonnx::decode {

template <class C>
Kernel kernel_of(bool shares, bool bfloat16) {
  if constexpr (C::kRowTiles == 1) {
    if (shares) return bfloat16 ? attend_shares<__nv_bfloat16, C> : attend_shares<__half, C>;
  }
  return bfloat16 ? attend<__nv_bfloat16, C> : attend<__half, C>;
}

}  // namespace flashonnx::decode

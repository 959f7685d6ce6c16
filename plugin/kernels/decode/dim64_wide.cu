#include "kernels/decode/kernels.cuh"

namespace flashonnx::decode {

Kernel kernel_64_wide(bool shares, bool bfloat16) {
  return kernel_of<Tiling64Wide>(shares, bfloat16);
}

}  // namespace flashonnx::decode

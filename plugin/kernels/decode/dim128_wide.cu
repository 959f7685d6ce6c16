#include "kernels/decode/kernels.cuh"

namespace flashonnx::decode {

Kernel kernel_128_wide(bool shares, bool bfloat16) {
  return kernel_of<Tiling128Wide>(shares, bfloat16);
}

}  // namespace flashonnx::decode

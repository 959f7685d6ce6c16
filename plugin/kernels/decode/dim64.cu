#include "kernels/decode/kernels.cuh"

namespace flashonnx::decode {

Kernel kernel_64(bool shares, bool bfloat16) { return kernel_of<Tiling64>(shares, bfloat16); }

}  // namespace flashonnx::decode

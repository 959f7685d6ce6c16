#include "kernels/decode/kernels.cuh"

namespace flashonnx::decode {

Kernel kernel_128(bool shares, bool bfloat16) { return kernel_of<Tiling128>(shares, bfloat16); }

}  // namespace flashonnx::decode

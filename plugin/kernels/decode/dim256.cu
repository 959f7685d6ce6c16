#include "kernels/decode/kernels.cuh"

namespace flashonnx::decode {

Kernel kernel_256(bool shares, bool bfloat16) { return kernel_of<Tiling256>(shares, bfloat16); }

}  // namespace flashonnx::decode

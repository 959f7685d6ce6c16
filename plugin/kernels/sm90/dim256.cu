#include "kernels/sm90/launch.cuh"

namespace flashonnx::sm90 {

template struct Kernels<Tiling256>;
template struct Kernels<Masked256>;
template struct Kernels<General256>;

}  // namespace flashonnx::sm90

#include "kernels/sm90/launch.cuh"

namespace flashonnx::sm90 {

template struct Kernels<Tiling128>;
template struct Kernels<Masked128>;
template struct Kernels<General128>;

}  // namespace flashonnx::sm90

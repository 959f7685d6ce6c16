#include "kernels/sm90/launch.cuh"

namespace flashonnx::sm90 {

template struct Kernels<Tiling192>;
template struct Kernels<Tiling192x128>;
template struct Kernels<Masked192x128>;

}  // namespace flashonnx::sm90

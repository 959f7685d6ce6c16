#include "kernels/sm90/launch.cuh"

namespace flashonnx::sm90 {

template struct Kernels<Tiling96>;

}  // namespace flashonnx::sm90

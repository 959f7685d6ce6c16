#include "kernels/sm90/launch.cuh"

namespace flashonnx::sm90 {

template struct Kernels<Weighted128>;

}  // namespace flashonnx::sm90

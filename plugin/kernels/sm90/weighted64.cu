#include "kernels/sm90/launch.cuh"

namespace flashonnx::sm90 {

template struct Kernels<Weighted64>;

}  // namespace flashonnx::sm90

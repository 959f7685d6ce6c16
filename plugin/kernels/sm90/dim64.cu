#include "kernels/sm90/launch.cuh"

namespace flashonnx::sm90 {

template struct Kernels<Tiling64>;
template struct Kernels<Short64>;
template struct Kernels<Masked64>;
template struct Kernels<MaskedShort64>;
template struct Kernels<General64>;
template struct Kernels<Biased<Short64>>;

}  // namespace flashonnx::sm90

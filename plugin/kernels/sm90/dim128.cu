#include "kernels/sm90/launch.cuh"

namespace flashonnx::sm90 {

flashonnx_status launch_128(const Params& params, cudaStream_t stream) {
  return launch_either<Tiling128, General128>(params, stream);
}

}  // namespace flashonnx::sm90

#include "kernels/sm90/launch.cuh"

namespace flashonnx::sm90 {

flashonnx_status launch_64(const Params& params, cudaStream_t stream) {
  return launch_either<Tiling64, General64>(params, stream);
}

}  // namespace flashonnx::sm90

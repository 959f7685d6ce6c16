#include "kernels/sm90/launch.cuh"

namespace flashonnx::sm90 {

flashonnx_status launch_192(const Params& params, cudaStream_t stream) {
  return launch_either<Tiling192, General192>(params, stream);
}

}  // namespace flashonnx::sm90

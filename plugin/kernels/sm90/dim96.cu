#include "kernels/sm90/launch.cuh"

namespace flashonnx::sm90 {

flashonnx_status launch_96(const Params& params, cudaStream_t stream) {
  return launch_either<Tiling96, General96>(params, stream);
}

}  // namespace flashonnx::sm90

#include "kernels/sm90/launch.cuh"

namespace flashonnx::sm90 {

flashonnx_status launch_256(const Params& params, cudaStream_t stream) {
  return launch_either<Tiling256, General256>(params, stream);
}

}  // namespace flashonnx::sm90

#include "kernels/sm90/launch.cuh"

namespace flashonnx::sm90 {

flashonnx_status launch_256(const Params& params, void* workspace, cudaStream_t stream) {
  return launch_one_of<Tiling256, Masked256, General256>(params, workspace, stream);
}

}  // namespace flashonnx::sm90

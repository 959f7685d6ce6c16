#include "kernels/sm90/launch.cuh"

namespace flashonnx::sm90 {

flashonnx_status launch_96(const Params& params, void* workspace, cudaStream_t stream) {
  return launch_one_of<Tiling96, Masked96, General96>(params, workspace, stream);
}

}  // namespace flashonnx::sm90

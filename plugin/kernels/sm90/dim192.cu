#include "kernels/sm90/launch.cuh"

namespace flashonnx::sm90 {

flashonnx_status launch_192(const Params& params, void* workspace, cudaStream_t stream) {
  return params.value_dim <= Tiling192x128::kValueDim
             ? launch_one_of<Tiling192x128, Masked192x128, General192>(params, workspace, stream)
             : launch_one_of<Tiling192, Masked192, General192>(params, workspace, stream);
}

}  // namespace flashonnx::sm90

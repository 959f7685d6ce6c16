#include "kernels/sm90/launch.cuh"

namespace flashonnx::sm90 {

flashonnx_status launch_192(const Params& params, cudaStream_t stream) {
  return params.value_dim <= Tiling192x128::kValueDim
             ? launch_either<Tiling192x128, General192>(params, stream)
             : launch_either<Tiling192, General192>(params, stream);
}

}  // namespace flashonnx::sm90

#include "kernels/sm90/launch.cuh"

namespace flashonnx::sm90 {

flashonnx_status launch_weighted_128(const Params& params, void* workspace, cudaStream_t stream) {
  return launch_weighted<Weighted128>(params, workspace, stream);
}

}  // namespace flashonnx::sm90

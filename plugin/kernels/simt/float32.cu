#include "kernels/simt/launch.cuh"

namespace flashonnx::simt {

flashonnx_status launch_float32(const Problem& problem, int64_t shared_limit, cudaStream_t stream) {
  return launch_type<float, false>(problem, shared_limit, stream);
}

}  // namespace flashonnx::simt

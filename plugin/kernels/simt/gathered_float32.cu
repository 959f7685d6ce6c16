#include "kernels/simt/launch.cuh"

namespace flashonnx::simt {

flashonnx_status launch_gathered_float32(const Problem& problem, int64_t shared_limit,
                                         cudaStream_t stream) {
  return launch_type<float, true>(problem, shared_limit, stream);
}

}  // namespace flashonnx::simt

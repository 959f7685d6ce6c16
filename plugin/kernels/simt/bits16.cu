#include "kernels/simt/launch.cuh"

namespace flashonnx::simt {

flashonnx_status launch_16bit(const Problem& problem, int64_t shared_limit, cudaStream_t stream) {
  return launch_type<uint16_t, false>(problem, shared_limit, stream);
}

}  // namespace flashonnx::simt

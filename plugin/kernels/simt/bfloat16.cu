#include "kernels/simt/launch.cuh"

namespace flashonnx::simt {

flashonnx_status launch_bfloat16(const Problem& problem, int64_t shared_limit,
                                 cudaStream_t stream) {
  return launch_type<__nv_bfloat16>(problem, shared_limit, stream);
}

}  // namespace flashonnx::simt

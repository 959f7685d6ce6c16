#include "kernels/tf32/launch.cuh"

namespace flashonnx::tf32 {

flashonnx_status launch_128(const Problem& problem, const Plan& plan, cudaStream_t stream) {
  return launch_tiling<Tiling128>(problem, plan, stream);
}

}  // namespace flashonnx::tf32

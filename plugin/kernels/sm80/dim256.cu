#include "kernels/sm80/launch.cuh"

namespace flashonnx::sm80 {

flashonnx_status launch_256(const Problem& problem, const Plan& plan, bool bfloat16,
                            cudaStream_t stream) {
  return launch_tiling<Tiling256>(problem, plan, bfloat16, stream);
}

}  // namespace flashonnx::sm80

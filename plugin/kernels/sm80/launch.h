// One launch function per bucket of head dimensions, each in its own file.
#pragma once

#include <cuda_runtime_api.h>

#include "flashonnx/status.h"
#include "kernels/common/plan.h"

namespace flashonnx::sm80 {

flashonnx_status launch_32(const Problem& problem, const Plan& plan, bool bfloat16,
                           cudaStream_t stream);
flashonnx_status launch_64(const Problem& problem, const Plan& plan, bool bfloat16,
                           cudaStream_t stream);
flashonnx_status launch_96(const Problem& problem, const Plan& plan, bool bfloat16,
                           cudaStream_t stream);
flashonnx_status launch_128(const Problem& problem, const Plan& plan, bool bfloat16,
                            cudaStream_t stream);
flashonnx_status launch_192(const Problem& problem, const Plan& plan, bool bfloat16,
                            cudaStream_t stream);
flashonnx_status launch_256(const Problem& problem, const Plan& plan, bool bfloat16,
                            cudaStream_t stream);

}  // namespace flashonnx::sm80

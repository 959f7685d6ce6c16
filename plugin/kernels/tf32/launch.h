// One launch function per bucket of head dimensions, each in its own file.
#pragma once

#include <cuda_runtime_api.h>

#include "flashonnx/status.h"
#include "kernels/common/plan.h"

namespace flashonnx::tf32 {

flashonnx_status launch_64(const Problem& problem, const Plan& plan, cudaStream_t stream);
flashonnx_status launch_128(const Problem& problem, const Plan& plan, cudaStream_t stream);

}  // namespace flashonnx::tf32

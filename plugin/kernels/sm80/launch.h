// One launch function per bucket of head dimensions, each in its own file.
#pragma once

#include <cuda_runtime_api.h>

#include "flashonnx/status.h"
#include "kernels/common/plan.h"

namespace flashonnx::sm80 {

// Ragged batches and pages have code for some of the buckets: each instance costs its compilation.
constexpr int64_t gathered_dim(int64_t dim) { return dim <= 64 ? 64 : dim <= 128 ? 128 : 256; }

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

// One launch function per element size of Q, K and V, each in its own file. Head dimensions are at
// most 512; the launch fills in Problem::tiles and blocks. With splits, o and lse are the partial
// outputs, and launch_combine follows.
#pragma once

#include <cuda_runtime_api.h>

#include "flashonnx/status.h"
#include "kernels/simt/problem.h"

namespace flashonnx::simt {

flashonnx_status launch_float32(const Problem& problem, int64_t shared_limit, cudaStream_t stream);
// float16 and bfloat16, as Problem::bfloat16 says.
flashonnx_status launch_16bit(const Problem& problem, int64_t shared_limit, cudaStream_t stream);
// The same of ragged batches and pages.
flashonnx_status launch_gathered_float32(const Problem& problem, int64_t shared_limit,
                                         cudaStream_t stream);
flashonnx_status launch_gathered_16bit(const Problem& problem, int64_t shared_limit,
                                       cudaStream_t stream);

// Writes the outputs of `problem`, whose splits' outputs stand in `partial` (its o and lse;
// float32, features dense).
flashonnx_status launch_combine(const Problem& problem, const Problem& partial, int32_t value_dtype,
                                cudaStream_t stream);

}  // namespace flashonnx::simt

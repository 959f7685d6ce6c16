// One launch function per element type of Q, K and V, each in its own file. Head dimensions are at most 512; the launch fills
// in Problem::tiles and blocks.
#pragma once

#include <cuda_runtime_api.h>

#include "flashonnx/status.h"
#include "kernels/simt/problem.h"

namespace flashonnx::simt {

flashonnx_status launch_float32(const Problem& problem, int64_t shared_limit, cudaStream_t stream);
flashonnx_status launch_float16(const Problem& problem, int64_t shared_limit, cudaStream_t stream);
flashonnx_status launch_bfloat16(const Problem& problem, int64_t shared_limit, cudaStream_t stream);

}  // namespace flashonnx::simt

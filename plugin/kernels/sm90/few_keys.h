// Launches of few or short tiles, up to head size 64: see few_keys.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include "flashonnx/status.h"
#include "kernels/table.h"

namespace flashonnx::sm90 {

// Whether they are done sooner so.
bool has_few_keys(const Params& params);

flashonnx_status launch_few_keys(const Params& params, cudaStream_t stream);

}  // namespace flashonnx::sm90

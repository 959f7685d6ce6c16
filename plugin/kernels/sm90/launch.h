// One launch function per bucket of head dimensions, each in its own file.
#pragma once

#include <cuda_runtime_api.h>

#include "flashonnx/status.h"
#include "kernels/table.h"

namespace flashonnx::sm90 {

flashonnx_status launch_64(const Params& params, void* workspace, cudaStream_t stream);
flashonnx_status launch_96(const Params& params, void* workspace, cudaStream_t stream);
flashonnx_status launch_128(const Params& params, void* workspace, cudaStream_t stream);
flashonnx_status launch_192(const Params& params, void* workspace, cudaStream_t stream);
flashonnx_status launch_256(const Params& params, void* workspace, cudaStream_t stream);
// By weights.
flashonnx_status launch_weighted_64(const Params& params, void* workspace, cudaStream_t stream);
flashonnx_status launch_weighted_128(const Params& params, void* workspace, cudaStream_t stream);
// Of ragged batches and pages, whose other head dimensions take the next larger ones'.
flashonnx_status launch_gathered_64(const Params& params, cudaStream_t stream);
flashonnx_status launch_gathered_128(const Params& params, cudaStream_t stream);
flashonnx_status launch_gathered_256(const Params& params, cudaStream_t stream);

}  // namespace flashonnx::sm90

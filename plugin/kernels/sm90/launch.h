// The kernels, and what launches each: tilings have one instance, in the files of head dimensions.
#pragma once

#include <cuda_runtime_api.h>

#include "flashonnx/status.h"
#include "kernels/common/plan.h"
#include "kernels/sm90/packed_mask.h"
#include "kernels/table.h"

namespace flashonnx::sm90 {

// Of one tiling, for the element types that it has.
template <class C>
struct Kernels {
  static flashonnx_status launch(const Params& params, Plan plan, const PackedMask& packed,
                                 cudaStream_t stream);
};

// Of ragged batches and pages, whose other head dimensions take the next larger one's.
flashonnx_status launch_gathered_64(const Params& params, cudaStream_t stream);
flashonnx_status launch_gathered_128(const Params& params, cudaStream_t stream);
flashonnx_status launch_gathered_256(const Params& params, cudaStream_t stream);

}  // namespace flashonnx::sm90

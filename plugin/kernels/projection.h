// Biases of projections, where the kernel that runs does not see to them: sums of both in
// workspace.
#pragma once

#include "kernels/table.h"

namespace flashonnx {

// Of q, k and v in the workspace: where they begin, -1 where there is no bias to add.
struct Sums {
  int64_t offsets[3] = {-1, -1, -1};
  int64_t bytes = 0;  // of all
};

bool has_projection_bias(const Params& params);

// The problem without biases: its projections are sums, which have no data yet.
Params with_sums(const Params& params, Sums* sums);

// Adds biases, and points `summed` to the sums. On the CPU or, on `stream`, on the current device.
flashonnx_status add_biases(const Params& params, const Sums& sums, char* workspace, Params* summed,
                            void* stream);

// A projection (batch, heads, rows, dim) and the sum, whose rows are one after another.
struct BiasedProjection {
  flashonnx_tensor from, bias, to;
  int64_t batch, heads, rows, dim;
};

namespace cpu {
void add_bias(const Params& params, const BiasedProjection& projection);
}
flashonnx_status add_biases_cuda(const BiasedProjection (&projections)[3], void* stream);

}  // namespace flashonnx

// Biases of projections, where the kernel that runs does not see to them: sums of both in
// workspace.
#pragma once

#include "kernels/resolve.h"

namespace flashonnx {

// Of q, k and v, where they have biases, in the workspace.
struct Sums {
  Part parts[3];
  int64_t bytes = 0;
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

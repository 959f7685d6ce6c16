// What a mask of biases with a row per query is turned into by a small kernel before the attention
// kernel, if heads or batch entries share it: weights of P (weights.cuh), bfloat16, of each row
// relative to the largest bias of a key that the row may see. It reads the mask once for all.
#pragma once

#include "kernels/sm90/packed_mask.h"

namespace flashonnx::sm90 {

// Whether it pays, and is exact enough: sums of weighted P are too coarse for lse, and float16 has
// too little range.
bool is_weighed(const Params& params);

// Of workspace, for this problem and at most for one of sizes up to these.
int64_t weights_bytes(const Params& params);
int64_t weights_bound(const Params& params);

// For tiles of these sizes. Of each tile in `packed.tiles`: for each consumer warp 16 keys after
// one another, 16 bytes a lane, as operand A is laid out. `packed.top`: of each row, in powers of
// 2; -infinity if it sees no key.
flashonnx_status pack_weights(const Params& params, int queries, int keys, void* workspace,
                              cudaStream_t stream, PackedMask* packed);

}  // namespace flashonnx::sm90

// How tiles of queries are taken where lengths are on the device alone: see gathered.cuh.
#pragma once

#include "kernels/common/plan.h"

namespace flashonnx::sm90 {

struct Gathering {
  uint32_t* drawn;    // tiles of queries, 0 before the launch
  int32_t sequences;  // of the batch
  int32_t part;       // of them, for each lane of a warp
  Divider section;    // heads that are taken together
  Divider rows;       // of K and V, in a box of the copy engine
};

// With `keys` in a tile, and what the kernel is told otherwise then.
Gathering gathering_of(const Params& params, int keys, Problem* p, Plan* plan);

}  // namespace flashonnx::sm90

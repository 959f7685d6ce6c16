// How tiles of queries are taken where lengths are on the device alone: see gathered.cuh.
#pragma once

#include "kernels/common/plan.h"
#include "kernels/sm90/config.h"

namespace flashonnx::sm90 {

struct Gathering {
  uint32_t* drawn;    // tiles of queries, 0 before the launch
  int32_t sequences;  // of the batch
  int32_t part;       // of them, for each lane of a warp
  Divider section;    // heads that are taken together
  Divider rows;       // of K and V, in a box of the copy engine
  // Of pages: boxes have all features, 8 rows after 8 rows; else rows of some, box after box.
  int32_t whole_rows;
  int32_t unit_bits;       // of the rows that the copy engine counts as one: 8, or 1
  int32_t k_page, v_page;  // of these, from a page to the next
  Layout layout;
};

// Rows from a page of K or V to the next; 0: pages do not begin at whole rows.
int64_t rows_of_page(const Params& params, const flashonnx_tensor& tensor);

// With `keys` in a tile, of so many boxes of 64 features, and what the kernel is told otherwise
// then.
Gathering gathering_of(const Params& params, const Plan& plan, int keys, int boxes, Problem* p);

}  // namespace flashonnx::sm90

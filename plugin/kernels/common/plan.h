// What a launch of a tensor-core kernel adds to the problem, and which tile of it a block takes.
#pragma once

#include "kernels/common/problem.h"

namespace flashonnx {

constexpr float kLog2e = 1.4426950408889634f;

struct Plan {
  int32_t row_tiles;  // tiles of queries of one head
  // Tiles of `section` heads are dealt out together: their K and V share the L2 cache.
  Divider section, section_tiles, q_heads, group;
  int32_t longest_last;  // later tiles of a head see more keys; they are dealt out first
  int32_t mask_per_key;  // there is a mask, and it does not depend on the query
  int32_t mask_bytes;    // of an element
  int64_t mask_step;     // bytes from a key to the next
  int32_t all_tiles;  // every tile needs `general_scores`: soft cap, a mask per query, a scale that
                      // is not positive
  float factor;       // scale * log2 e
  float cap_in, cap_out;  // cap_out * tanh(cap_in * product) is the capped score in powers of 2
  int32_t q_vectors, k_vectors, v_vectors;  // rows begin at multiples of 16 bytes
  int32_t o_vectors;                        // as well, of whole vectors of Q's type
  int32_t mask_vectors;                     // as well, neighbouring keys side by side
};

// Without `section_tiles` and `row_tiles`, which depend on the tile.
Plan plan_of(const Params& params);

struct Work {
  int32_t batch, head, kv_head, first_query;
};

template <class C>
FLASHONNX_HOST_DEVICE Work work_of(const Plan& plan, uint32_t block) {
  const uint32_t section = plan.section_tiles.quotient(block);
  const uint32_t rest = block - section * plan.section_tiles.divisor;
  const uint32_t tile = plan.section.quotient(rest);
  const uint32_t batch_head = (section - tile) * plan.section.divisor + rest;
  const uint32_t batch = plan.q_heads.quotient(batch_head);
  const uint32_t head = batch_head - batch * plan.q_heads.divisor;
  return {static_cast<int32_t>(batch), static_cast<int32_t>(head),
          static_cast<int32_t>(plan.group.quotient(head)),
          static_cast<int32_t>(plan.longest_last ? plan.row_tiles - 1 - tile : tile) * C::kQueries};
}

}  // namespace flashonnx

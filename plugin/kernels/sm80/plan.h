// What a launch adds to the problem.
#pragma once

#include "kernels/common/problem.h"

namespace flashonnx::sm80 {

constexpr float kLog2e = 1.4426950408889634f;

struct Plan {
  int32_t row_tiles;      // tiles of queries of one head
  int32_t section;        // heads whose tiles are dealt out together, longest first: their K and V share the L2 cache
  int32_t longest_last;   // later tiles of a head see more keys
  int32_t mask_per_key;   // there is a mask, and it does not depend on the query
  int32_t all_tiles;      // every tile needs `general_scores`: soft cap, a mask per query, a scale that is not positive
  float factor;           // scale * log2 e
  float cap_in, cap_out;  // cap_out * tanh(cap_in * product) is the capped score in powers of 2
  int32_t q_vectors, k_vectors, v_vectors;  // rows begin at multiples of 16 bytes
  int32_t o_vectors;  // as well, of whole vectors of Q's type
};

}  // namespace flashonnx::sm80

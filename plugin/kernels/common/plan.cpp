#include "kernels/common/plan.h"

#include <algorithm>

namespace flashonnx {

Plan plan_of(const Params& params) {
  // K and V of the heads that run at the same time should fit in half the L2 cache of a large GPU;
  // a smaller cache still has the tiles of one head in common.
  constexpr int64_t kSectionBytes = int64_t{32} << 20;
  Plan plan = {};
  const bool mask = params.mask.dtype != FLASHONNX_NONE;
  plan.longest_last = params.is_causal || params.window_right >= 0;
  int64_t section = 1;
  const Rows queries = query_rows(params), keys = key_rows(params);
  const int64_t heads = queries.batch * params.q_heads, group = params.q_heads / params.kv_heads;
  if (plan.longest_last) {
    const int64_t bytes =  // at a launch there may be no keys
        std::max<int64_t>(params.kv_length * (params.head_dim + params.value_dim) * 2, 1);
    section = std::clamp<int64_t>(kSectionBytes / bytes * group, 1, heads);
    while (heads % section != 0) --section;
  }
  plan.section = Divider(static_cast<uint32_t>(section));
  plan.q_heads = Divider(static_cast<uint32_t>(params.q_heads));
  plan.group = Divider(static_cast<uint32_t>(group));
  plan.mask_bytes = size_of(params.mask.dtype);
  plan.mask_step = params.mask.stride[3] * plan.mask_bytes;
  plan.mask_per_key = mask && (params.mask.stride[2] == 0 || params.q_length == 1);
  plan.all_tiles = params.softcap > 0 || !(params.scale > 0) || (mask && !plan.mask_per_key);
  plan.factor = params.scale * kLog2e;
  if (params.softcap > 0) {
    plan.cap_in = params.scale / params.softcap;
    plan.cap_out = params.softcap * kLog2e;
  }
  plan.q_vectors = rows_aligned(params.q, queries.batch, params.q_heads, queries.rows, 16);
  plan.k_vectors = rows_aligned(params.k, keys.batch, params.kv_heads, keys.rows, 16);
  plan.v_vectors = rows_aligned(params.v, keys.batch, params.kv_heads, keys.rows, 16);
  plan.o_vectors = params.o.dtype == params.q.dtype && params.value_dim % 8 == 0 &&
                   rows_aligned(params.o, queries.batch, params.q_heads, queries.rows, 16);
  plan.mask_vectors = mask && params.mask.stride[3] == 1 &&
                      rows_aligned(params.mask, params.batch, params.q_heads, params.q_length, 16);
  return plan;
}

}  // namespace flashonnx

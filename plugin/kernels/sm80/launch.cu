// Plans a problem and picks the tiling for its head dimensions.
#include "kernels/sm80/launch.h"

#include <algorithm>
#include <limits>

#include "kernels/common/status.h"

namespace flashonnx::sm80 {

Plan plan_of(const Params& params) {
  // K and V of the heads that run at the same time should fit in half the L2 cache of a large GPU;
  // a smaller cache still has the tiles of one head in common.
  constexpr int64_t kSectionBytes = int64_t{32} << 20;
  Plan plan = {};
  const bool mask = params.mask.dtype != FLASHONNX_NONE;
  plan.longest_last = params.is_causal || params.window_right >= 0;
  int64_t section = 1;
  const int64_t heads = params.batch * params.q_heads, group = params.q_heads / params.kv_heads;
  if (plan.longest_last) {
    const int64_t bytes =
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
  plan.q_vectors = rows_aligned(params.q, params.batch, params.q_heads, params.q_length, 16);
  plan.k_vectors = rows_aligned(params.k, params.batch, params.kv_heads, params.kv_length, 16);
  plan.v_vectors = rows_aligned(params.v, params.batch, params.kv_heads, params.kv_length, 16);
  plan.o_vectors = params.o.dtype == params.q.dtype && params.value_dim % 8 == 0 &&
                   rows_aligned(params.o, params.batch, params.q_heads, params.q_length, 16);
  plan.mask_vectors = mask && params.mask.stride[3] == 1 &&
                      rows_aligned(params.mask, params.batch, params.q_heads, params.q_length, 16);
  return plan;
}

const char* refusal(const Params& params) {
  // Measured on an H200: up to here simt's split keys beat one block for each head.
  constexpr int64_t kFewHeads = 64, kFewQueries = 128, kManyKeys = 2048;
  const int64_t heads = params.batch * params.q_heads;
  if (params.q_length > kMaxPositions || params.kv_length > kMaxPositions - params.q_length) {
    return "counts queries and keys together up to 2^31";
  }
  if ((params.q_length + 63) / 64 >
      std::numeric_limits<int32_t>::max() / std::max<int64_t>(heads, 1)) {
    return "starts up to 2^31 blocks";
  }
  if (!params.fixed_split && heads <= kFewHeads && heads * params.q_length <= kFewQueries &&
      params.kv_length >= kManyKeys) {
    return "does not split the keys of few queries";
  }
  return nullptr;
}

flashonnx_status launch(const Params& params, void*, void* stream) {
  const Problem problem = problem_of(params);
  const Plan plan = plan_of(params);
  const bool bfloat16 = params.q.dtype == FLASHONNX_BFLOAT16;
  const int64_t dim = std::max(params.head_dim, params.value_dim);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (dim <= 32) return launch_32(problem, plan, bfloat16, cuda_stream);
  if (dim <= 64) return launch_64(problem, plan, bfloat16, cuda_stream);
  if (dim <= 96) return launch_96(problem, plan, bfloat16, cuda_stream);
  if (dim <= 128) return launch_128(problem, plan, bfloat16, cuda_stream);
  if (dim <= 192) return launch_192(problem, plan, bfloat16, cuda_stream);
  return launch_256(problem, plan, bfloat16, cuda_stream);
}

}  // namespace flashonnx::sm80

// Which problems are taken, and the tiling for their head dimensions.
#include "kernels/sm80/launch.h"

#include <algorithm>
#include <limits>

#include "kernels/common/status.h"

namespace flashonnx::sm80 {

const char* refusal(const Params& params) {
  // Measured on an H200: up to here simt's split keys beat one block for each head.
  constexpr int64_t kFewHeads = 64, kFewQueries = 128, kManyKeys = 2048;
  const Rows rows = query_rows(params);
  const int64_t heads = rows.batch * params.q_heads;
  const bool ragged = params.cu_seqlens_q.dtype != FLASHONNX_NONE;
  const int64_t tiles = rows.rows / 64 + (ragged ? params.batch : 1);  // see find_tile
  if (params.q_length > kMaxPositions || params.kv_length > kMaxPositions - params.q_length) {
    return "counts queries and keys together up to 2^31";
  }
  if (tiles > std::numeric_limits<int32_t>::max() / heads) {
    return "starts up to 2^31 blocks";
  }
  const bool mask_per_query = params.mask.stride[2] != 0 && params.q_length > 1;
  if (size_of(params.mask.dtype) == 2 && params.mask.dtype != params.q.dtype && mask_per_query) {
    return "takes a mask of two bytes and a row per query in Q's type";
  }
  const bool gathered = ragged || params.block_table.dtype != FLASHONNX_NONE;
  if (gathered && params.empty_row == FLASHONNX_EMPTY_ROW_MEAN)
    return "leaves empty rows 0 in ragged batches and with pages";
  if (!params.fixed_split && heads <= kFewHeads && heads * rows.rows <= kFewQueries &&
      params.kv_length >= kManyKeys) {
    return "does not split the keys of few queries";
  }
  return nullptr;
}

flashonnx_status launch(const Params& params, void*, void* stream) {
  Problem problem = problem_of(params);
  Plan plan = plan_of(params);
  if (problem.ragged.queries) {  // one run of tokens, of which each tile finds its sequence
    problem.batch_heads = params.q_heads;
    problem.q.batch = problem.o.batch = problem.lse.batch = 0;
  }
  if (problem.ragged.keys || problem.pages.table) problem.k.batch = problem.v.batch = 0;
  // A key without a page has a bias. A mask with a row for each query has none, and goes first.
  if (problem.pages.table && !problem.mask.data) plan.mask_per_key = true;
  const bool bfloat16 = params.q.dtype == FLASHONNX_BFLOAT16;
  int64_t dim = std::max(params.head_dim, params.value_dim);
  if (problem.ragged.queries || problem.pages.table) dim = gathered_dim(dim);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (dim <= 32) return launch_32(problem, plan, bfloat16, cuda_stream);
  if (dim <= 64) return launch_64(problem, plan, bfloat16, cuda_stream);
  if (dim <= 96) return launch_96(problem, plan, bfloat16, cuda_stream);
  if (dim <= 128) return launch_128(problem, plan, bfloat16, cuda_stream);
  if (dim <= 192) return launch_192(problem, plan, bfloat16, cuda_stream);
  return launch_256(problem, plan, bfloat16, cuda_stream);
}

}  // namespace flashonnx::sm80

// Which problems are taken, and the tiling for their head dimensions.
#include "kernels/tf32/launch.h"

#include <algorithm>
#include <limits>

#include "kernels/common/status.h"

namespace flashonnx::tf32 {

const char* refusal(const Params& params) {
  // A float32 product is three TF32 ones here. TF32 by tensor cores and float32, in TFLOP/s: A100
  // 156 and 19.5, H200 494 and 67, B200 1100 and 75; but RTX 3090 (8.6) 36 and 36, L40 (8.9) 91 and
  // 91, RTX 5090 (12.0) 105 and 105.
  const int arch = params.device.arch;
  if (arch != 80 && arch != 90 && arch / 10 != 10) {
    return "is for compute capability 8.0, 9.0 and 10.x, whose TF32 is fast enough";
  }
  // Measured on an H200: simt is faster on few queries, and, as it splits their keys, where there
  // are so few tiles of queries that most of the device idles.
  constexpr int64_t kManyKeys = 512, kTileQueries = 128;
  const int64_t few_queries = std::max(params.head_dim, params.value_dim) <= 64 ? 4 : 64;
  const int64_t heads = params.batch * params.q_heads;
  if (params.q_length > kMaxPositions || params.kv_length > kMaxPositions - params.q_length) {
    return "counts queries and keys together up to 2^31";
  }
  if ((params.q_length + 63) / 64 > std::numeric_limits<int32_t>::max() / heads) {
    return "starts up to 2^31 blocks";
  }
  const bool mask_per_query = params.mask.stride[2] != 0 && params.q_length > 1;
  if (params.mask.dtype == FLASHONNX_BFLOAT16 && mask_per_query) {
    return "takes no bfloat16 mask with a row per query";
  }
  const int64_t tiles = (params.q_length + kTileQueries - 1) / kTileQueries * heads;
  const bool idle = 5 * tiles < 3 * int64_t{params.device.sm_count};
  if (params.q_length <= few_queries ||
      (idle && params.kv_length >= kManyKeys && !params.fixed_split)) {
    return "does not split the keys of few queries";
  }
  return nullptr;
}

flashonnx_status launch(const Params& params, void*, void* stream) {
  const Problem problem = problem_of(params);
  const Plan plan = plan_of(params);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (std::max(params.head_dim, params.value_dim) <= 64)
    return launch_64(problem, plan, cuda_stream);
  return launch_128(problem, plan, cuda_stream);
}

}  // namespace flashonnx::tf32

// Brings together the partitions that the workspace holds.
//
// Grid: linear in x, a warp for each packed row. Block: 4 warps, no shared memory.
#include <cuda_runtime.h>

#include "kernels/decode/finish.cuh"
#include "kernels/decode/launch.h"

namespace flashonnx::decode {
namespace {

constexpr int kWarps = 4;

template <class T>
__global__ void __launch_bounds__(32 * kWarps)
    combine(const __grid_constant__ Problem p, const __grid_constant__ Decode d) {
  const int64_t packed = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (packed >= d.all_rows) return;
  // As in work_of: rows of a tile, tiles of a key head, key heads of a batch entry.
  const uint32_t tile = static_cast<uint32_t>(packed / d.rows);
  const uint32_t head = d.row_tiles.quotient(tile), batch = d.kv_heads.quotient(head);
  wait_for_predecessor();
  const int queries = queries_of(p, d, batch);
  const int first = (tile - head * d.row_tiles.divisor) * d.rows;
  const Rows rows = {first, min(rows_from(p, d, queries, first), d.rows), static_cast<int>(batch),
                     static_cast<int>(head - batch * d.kv_heads.divisor)};
  const int row = static_cast<int>(packed % d.rows);
  if (row >= rows.count) return;

  const int partitions = d.partitions.divisor;
  const auto part = [&](int i) { return d.partial_sums[i * d.all_rows + packed]; };
  const Sums sums = total_of(partitions, part);
  const int token = d.first_queries ? d.first_queries[batch] : 0;
  for (int feature = threadIdx.x % 32 * 4; feature < d.partial_dim; feature += 128) {
    const float4 output = outputs_of(partitions, sums.maximum, part, [&](int i) {
      return *reinterpret_cast<const float4*>(d.partial_outputs +
                                              (i * d.all_rows + packed) * d.partial_dim + feature);
    });
    store_output<T>(p, d, rows, token, row, feature, sums, output);
  }
}

}  // namespace

flashonnx_status launch_combine(const Problem& problem, const Decode& decode, bool bfloat16,
                                bool overlap, cudaStream_t stream) {
  cudaLaunchAttribute attribute = {};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>((decode.all_rows + kWarps - 1) / kWarps));
  config.blockDim = dim3(32 * kWarps);
  config.stream = stream;
  const auto kernel = bfloat16 ? combine<__nv_bfloat16> : combine<__half>;
  bool hopper = false;
  FLASHONNX_RETURN_IF_ERROR(has_hopper_code(reinterpret_cast<const void*>(kernel), &hopper));
  if (hopper && overlap) {
    attribute = overlap_attribute();
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  return cuda_status(cudaLaunchKernelEx(&config, kernel, problem, decode), "decode combine kernel");
}

}  // namespace flashonnx::decode

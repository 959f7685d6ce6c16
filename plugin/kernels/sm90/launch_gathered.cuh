// Launches the kernel of one tiling for ragged batches and pages, for both element types.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/common/overlap.cuh"
#include "kernels/sm90/gathered.cuh"
#include "kernels/sm90/launch.h"
#include "kernels/sm90/tensor_map.h"

namespace flashonnx::sm90 {

template <class C>
flashonnx_status launch_gathered(const Params& params, cudaStream_t stream) {
  constexpr int kBytes = C::kSharedBytes + C::kAlignment;
  Problem p = problem_of(params);
  Plan plan = plan_of(params);
  const Gathering gathering = gathering_of(params, plan, C::kKeys, C::kBoxes, &p);
  const Rows q_rows = query_rows(params), k_rows = key_rows(params);
  Maps maps;
  FLASHONNX_RETURN_IF_ERROR(encode_tensor_map(params.q, q_rows.batch, params.q_heads, q_rows.rows,
                                              params.head_dim, C::kQueries, C::kBox, &maps.q));
  const auto encode = [&](const flashonnx_tensor& tensor, int64_t dim, CUtensorMap* map) {
    if (!p.pages.table) {
      return encode_tensor_map(tensor, k_rows.batch, params.kv_heads, k_rows.rows, dim, C::kKeys,
                               C::kBox, map);
    }
    const int64_t rows = rows_of_page(params, tensor) * (params.num_pages - 1) + params.page_size;
    const int box_rows = gathering.rows.divisor;
    return gathering.whole_rows
               ? encode_whole_rows(tensor, params.kv_heads, rows, dim, box_rows, C::kDim, map)
               : encode_tensor_map(tensor, 1, params.kv_heads, rows, dim, box_rows, C::kBox, map);
  };
  FLASHONNX_RETURN_IF_ERROR(encode(params.k, params.head_dim, &maps.k));
  FLASHONNX_RETURN_IF_ERROR(encode(params.v, params.value_dim, &maps.v));
  plan.o_vectors &= strides_fit(params.o, q_rows.batch, params.q_heads, q_rows.rows);
  if (plan.o_vectors) {  // a warp's rows
    FLASHONNX_RETURN_IF_ERROR(encode_tensor_map(params.o, q_rows.batch, params.q_heads, q_rows.rows,
                                                params.value_dim, 16, C::kBox, &maps.o));
  }
  const bool bfloat16 = params.q.dtype == FLASHONNX_BFLOAT16;
  const auto kernel =
      bfloat16 ? gathered_attention<__nv_bfloat16, C> : gathered_attention<__half, C>;
  // Per device, so not once per process; it only writes a field of the loaded function.
  FLASHONNX_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  // At most; a sequence's last tile need not be full.
  const int64_t row_tiles = p.ragged.queries
                                ? q_rows.rows / C::kQueries + params.batch
                                : (q_rows.rows + C::kQueries - 1) / C::kQueries * q_rows.batch;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(
      static_cast<unsigned>(std::min<int64_t>(row_tiles * params.q_heads, params.device.sm_count)));
  config.blockDim = dim3(C::kThreads);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  cudaLaunchAttribute attribute = overlap_attribute();
  bool overlaps = false;
  FLASHONNX_RETURN_IF_ERROR(driver_overlaps(&overlaps));
  config.attrs = &attribute;
  config.numAttrs = overlaps ? 1 : 0;
  return cuda_status(cudaLaunchKernelEx(&config, kernel, p, plan, gathering, maps),
                     "sm90 gathered attention kernel");
}

}  // namespace flashonnx::sm90

// Launches the kernel of one tiling, for both element types. Each tiling is compiled in a file of
// its own.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/common/cuda.h"
#include "kernels/sm90/gathering.h"
#include "kernels/sm90/kernel.cuh"
#include "kernels/sm90/launch.h"
#include "kernels/sm90/tensor_map.h"

namespace flashonnx::sm90 {

template <class T, class C>
flashonnx_status launch_kernel(const Problem& p, const Plan& plan, const Schedule& schedule,
                               const Gathering& gathering, const Maps& maps, int sm_count,
                               cudaStream_t stream) {
  constexpr int kBytes = C::kSharedBytes + C::kAlignment;
  const auto kernel = attention<T, C>;
  // Per device, so not once per process; it only writes a field of the loaded function.
  FLASHONNX_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(std::min(schedule.items, sm_count)));
  config.blockDim = dim3(C::kThreads);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  return cuda_status(cudaLaunchKernelEx(&config, kernel, p, plan, schedule, gathering, maps),
                     "sm90 attention kernel");
}

template <class C>
flashonnx_status launch_tiling(const Params& params, Plan plan, cudaStream_t stream) {
  Problem p = problem_of(params);
  const Gathering gathering = gathering_of(params, C::kKeys, &p, &plan);
  Schedule schedule(p, plan, C::kQueries, params.device.sm_count);
  if (p.ragged.queries)
    schedule.items = (p.ragged.tokens / C::kQueries + p.ragged.sequences) * p.q_heads;
  const Rows q_rows = query_rows(params), k_rows = key_rows(params);
  const int box_rows = gathering.drawn ? gathering.rows.divisor : C::kKeys;
  Maps maps;
  FLASHONNX_RETURN_IF_ERROR(encode_tensor_map(params.q, q_rows, params.q_heads, params.head_dim,
                                              C::kQueries, C::kBox, &maps.q));
  FLASHONNX_RETURN_IF_ERROR(encode_tensor_map(params.k, k_rows, params.kv_heads, params.head_dim,
                                              box_rows, C::kBox, &maps.k));
  FLASHONNX_RETURN_IF_ERROR(encode_tensor_map(params.v, k_rows, params.kv_heads, params.value_dim,
                                              box_rows, C::kBox, &maps.v));
  plan.o_vectors &= strides_fit(params.o, q_rows, params.q_heads);
  if (plan.o_vectors) {  // a warp's rows
    FLASHONNX_RETURN_IF_ERROR(encode_tensor_map(params.o, q_rows, params.q_heads, params.value_dim,
                                                16, C::kBox, &maps.o));
  }
  if (C::kGeneral && p.mask.data && !plan.mask_per_key)
    FLASHONNX_RETURN_IF_ERROR(encode_mask_map(params, C::kQueries, C::kKeys, &maps.mask));
  const bool bfloat16 = params.q.dtype == FLASHONNX_BFLOAT16;
  const int sms = params.device.sm_count;
  return bfloat16 ? launch_kernel<__nv_bfloat16, C>(p, plan, schedule, gathering, maps, sms, stream)
                  : launch_kernel<__half, C>(p, plan, schedule, gathering, maps, sms, stream);
}

template <class C, class General>
flashonnx_status launch_either(const Params& params, cudaStream_t stream) {
  const Plan plan = plan_of(params);
  return plan.all_tiles ? launch_tiling<General>(params, plan, stream)
                        : launch_tiling<C>(params, plan, stream);
}

}  // namespace flashonnx::sm90

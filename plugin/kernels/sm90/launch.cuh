// Launches the kernels of one tiling, for both element types.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/common/cuda.h"
#include "kernels/sm90/kernel.cuh"
#include "kernels/sm90/launch.h"
#include "kernels/sm90/tensor_map.h"

namespace flashonnx::sm90 {

template <class T, class C>
flashonnx_status launch_kernel(const Problem& p, const Plan& plan, const Schedule& schedule,
                               const Maps& maps, const PackedMask& packed, int sm_count,
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
  // After the kernel that packs its mask always; after others on streams, where it saves 1.2 to 1.6
  // us, but not in graphs, whose launches follow each other as closely without.
  cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
  FLASHONNX_CUDA_CHECK(cudaStreamIsCapturing(stream, &capturing));
  bool overlaps = false;
  FLASHONNX_RETURN_IF_ERROR(driver_overlaps(&overlaps));
  overlaps &= packed.tile_count > 0 || capturing == cudaStreamCaptureStatusNone;
  cudaLaunchAttribute attribute = overlap_attribute();
  config.attrs = &attribute;
  config.numAttrs = overlaps ? 1 : 0;
  return cuda_status(cudaLaunchKernelEx(&config, kernel, p, plan, schedule, maps, packed),
                     "sm90 attention kernel");
}

template <class C>
flashonnx_status Kernels<C>::launch(const Params& params, Plan plan, const PackedMask& packed,
                                    cudaStream_t stream) {
  const Problem p = problem_of(params);
  const Schedule schedule(p, plan, C::kQueries, params.device.sm_count);
  Maps maps;
  FLASHONNX_RETURN_IF_ERROR(encode_tensor_map(params.q, params.batch, params.q_heads,
                                              params.q_length, params.head_dim, C::kQueries,
                                              C::kBox, &maps.q));
  FLASHONNX_RETURN_IF_ERROR(encode_tensor_map(params.k, params.batch, params.kv_heads,
                                              params.kv_length, params.head_dim, C::kKeys, C::kBox,
                                              &maps.k));
  FLASHONNX_RETURN_IF_ERROR(encode_tensor_map(params.v, params.batch, params.kv_heads,
                                              params.kv_length, params.value_dim, C::kKeys, C::kBox,
                                              &maps.v));
  plan.o_vectors &= strides_fit(params.o, params.batch, params.q_heads, params.q_length);
  if (plan.o_vectors) {  // a warp's rows
    FLASHONNX_RETURN_IF_ERROR(encode_tensor_map(params.o, params.batch, params.q_heads,
                                                params.q_length, params.value_dim, 16, C::kBox,
                                                &maps.o));
  }
  if (C::kGeneral && p.mask.data && !plan.mask_per_key)
    FLASHONNX_RETURN_IF_ERROR(encode_mask_map(params, C::kQueries, C::kKeys, &maps.mask));
  const bool bfloat16 = params.q.dtype == FLASHONNX_BFLOAT16;
  const int sms = params.device.sm_count;
  if constexpr (C::kWeights) {
    return launch_kernel<__nv_bfloat16, C>(p, plan, schedule, maps, packed, sms, stream);
  } else {
    return bfloat16 ? launch_kernel<__nv_bfloat16, C>(p, plan, schedule, maps, packed, sms, stream)
                    : launch_kernel<__half, C>(p, plan, schedule, maps, packed, sms, stream);
  }
}

}  // namespace flashonnx::sm90

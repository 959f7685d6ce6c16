// Launches the kernel of one tiling, for both element types. Each tiling is compiled in a file of
// its own.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/common/cuda.h"
#include "kernels/sm80/kernel.cuh"
#include "kernels/sm80/launch.h"

namespace flashonnx::sm80 {

template <class T, class C, Instance kInstance>
flashonnx_status launch_kernel(const Problem& p, Plan plan, cudaStream_t stream) {
  static_assert(C::kKeys <= C::kThreads && C::kKeys % 16 == 0 && C::kDim % 32 == 0);
  constexpr int kBytes = kInstance == kGathered ? C::kGatheredBytes : C::kSharedBytes;
  plan.row_tiles = (p.q_length + C::kQueries - 1) / C::kQueries;
  if (p.ragged.queries)  // see find_tile
    plan.row_tiles = p.ragged.tokens / C::kQueries + p.ragged.sequences;
  const unsigned blocks = static_cast<unsigned>(plan.row_tiles * p.batch_heads);
  plan.section_tiles = Divider(plan.section.divisor * plan.row_tiles);
  const auto kernel = attention<T, C, kInstance>;
  // Per device, so not once per process; it only writes a field of the loaded function.
  FLASHONNX_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(C::kThreads);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  return cuda_status(cudaLaunchKernelEx(&config, kernel, p, plan), "sm80 attention kernel");
}

template <class C>
flashonnx_status launch_tiling(const Problem& p, const Plan& plan, bool bfloat16,
                               cudaStream_t stream) {
  const auto launch = [&]<class T>(T) {
    if constexpr (gathered_dim(C::kDim) == C::kDim) {
      if (p.ragged.queries || p.pages.table) return launch_kernel<T, C, kGathered>(p, plan, stream);
    }
    if constexpr (C::kDim == 64) {
      // The kernel also divides by the factor.
      const bool divides = plan.factor > 1e-18f && plan.factor < 1e18f;
      if (plan.mask_per_key && !plan.all_tiles && divides)
        return launch_kernel<T, C, kKeyMask>(p, plan, stream);
    }
    if (plan.all_tiles || plan.mask_per_key) return launch_kernel<T, C, kGeneral>(p, plan, stream);
    return launch_kernel<T, C, kPlain>(p, plan, stream);
  };
  return bfloat16 ? launch(__nv_bfloat16()) : launch(__half());
}

}  // namespace flashonnx::sm80

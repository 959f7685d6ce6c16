// Launches the kernel of one tiling. Each tiling is compiled in a file of its own.
#pragma once

#include <cuda_runtime.h>

#include "kernels/common/cuda.h"
#include "kernels/tf32/kernel.cuh"
#include "kernels/tf32/launch.h"

namespace flashonnx::tf32 {

template <class C, bool kGeneral>
flashonnx_status launch_kernel(const Problem& p, Plan plan, cudaStream_t stream) {
  static_assert(C::kKeys <= C::kThreads && C::kKeys % 16 == 0 && C::kDim % 32 == 0);
  plan.row_tiles = (p.q_length + C::kQueries - 1) / C::kQueries;
  const unsigned blocks = static_cast<unsigned>(plan.row_tiles * p.batch_heads);
  plan.section_tiles = Divider(plan.section.divisor * plan.row_tiles);
  const auto kernel = attention<C, kGeneral>;
  // Per device, so not once per process; it only writes a field of the loaded function.
  FLASHONNX_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes));
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(C::kThreads);
  config.dynamicSmemBytes = C::kSharedBytes;
  config.stream = stream;
  return cuda_status(cudaLaunchKernelEx(&config, kernel, p, plan), "tf32 attention kernel");
}

template <class C>
flashonnx_status launch_tiling(const Problem& p, const Plan& plan, cudaStream_t stream) {
  if (plan.all_tiles || plan.mask_per_key) return launch_kernel<C, true>(p, plan, stream);
  return launch_kernel<C, false>(p, plan, stream);
}

}  // namespace flashonnx::tf32

// Launches the kernel for one element type, with the smallest tiling that its head dimensions fit.
#pragma once

#include <cuda_runtime.h>

#include "kernels/common/cuda.h"
#include "kernels/simt/config.h"
#include "kernels/simt/kernel.cuh"
#include "kernels/simt/launch.h"

namespace flashonnx::simt {

template <class T, class C, bool kGathered>
flashonnx_status launch_tiling(Problem problem, int64_t shared_limit, cudaStream_t stream) {
  // Always what the largest head dimension needs: another thread's launch of the same kernel must
  // not lower the limit.
  constexpr int64_t kShared = C::shared_bytes(C::kHeadDim);
  if (kShared > shared_limit) {
    return make_status(FLASHONNX_NOT_IMPLEMENTED,
                       "simt: %lld bytes of shared memory are needed, the device allows %lld",
                       static_cast<long long>(kShared), static_cast<long long>(shared_limit));
  }
  problem.tiles = kGathered && problem.ragged.queries
                      ? problem.ragged.tokens / C::kBlockRows + problem.ragged.sequences
                      : (problem.q_length + C::kBlockRows - 1) / C::kBlockRows;
  problem.blocks = problem.tiles * problem.batch_heads * problem.splits;
  constexpr int64_t kMaxX = (int64_t{1} << 31) - 1, kMaxY = 65535;
  const int64_t x = problem.blocks < kMaxX ? problem.blocks : kMaxX;
  const int64_t y = (problem.blocks + x - 1) / x;
  if (y > kMaxY)
    return make_status(FLASHONNX_NOT_IMPLEMENTED, "simt: too many blocks: %lld",
                       static_cast<long long>(problem.blocks));

  // Per device, so not once per process.
  const auto kernel = attention_kernel<T, C, kGathered>;
  FLASHONNX_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            static_cast<int>(kShared)));
  FLASHONNX_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                            cudaSharedmemCarveoutMaxShared));
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(x), static_cast<unsigned>(y));
  config.blockDim = dim3(C::kThreads);
  config.dynamicSmemBytes = C::shared_bytes(problem.head_dim);
  config.stream = stream;
  return cuda_status(cudaLaunchKernelEx(&config, kernel, problem), "simt attention kernel");
}

template <class T, bool kGathered>
flashonnx_status launch_type(const Problem& problem, int64_t shared_limit, cudaStream_t stream) {
  const int dim = problem.head_dim > problem.value_dim ? problem.head_dim : problem.value_dim;
  if (dim <= 64) return launch_tiling<T, Tiling64, kGathered>(problem, shared_limit, stream);
  if (dim <= 128) return launch_tiling<T, Tiling128, kGathered>(problem, shared_limit, stream);
  if (dim <= 256) return launch_tiling<T, Tiling256, kGathered>(problem, shared_limit, stream);
  return launch_tiling<T, Tiling512, kGathered>(problem, shared_limit, stream);
}

}  // namespace flashonnx::simt

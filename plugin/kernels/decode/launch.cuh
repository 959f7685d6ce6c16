// Launches the kernel of one tiling, for both element types.
#pragma once

#include <cuda_runtime.h>

#include "kernels/common/cuda.h"
#include "kernels/decode/kernel.cuh"
#include "kernels/decode/launch.h"

namespace flashonnx::decode {

template <class T, class C>
flashonnx_status launch_kernel(const Problem& p, const Decode& d, const Grid& grid,
                               cudaStream_t stream) {
  const auto kernel = attend<T, C>;
  // Per device, so not once per process; it only writes a field of the loaded function.
  FLASHONNX_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            grid.shared_limit));
  cudaLaunchAttribute attributes[3] = {};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid.blocks);
  config.blockDim = dim3(grid.threads);
  config.dynamicSmemBytes = grid.shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  // The function's own attribute of this name is lost in CUDA graphs.
  cudaLaunchAttribute& carveout = attributes[config.numAttrs++];
  carveout.id = cudaLaunchAttributePreferredSharedMemoryCarveout;
  carveout.val.sharedMemCarveout = cudaSharedmemCarveoutMaxShared;
  if (grid.overlap) {
    cudaLaunchAttribute& overlap = attributes[config.numAttrs++];
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
  }
  if (grid.cluster > 1) {
    if (grid.cluster > 8) {
      FLASHONNX_CUDA_CHECK(
          cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    }
    cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = grid.cluster;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  }
  return cuda_status(cudaLaunchKernelEx(&config, kernel, p, d), "decode attention kernel");
}

template <class C>
flashonnx_status launch_tiling(const Problem& p, const Decode& d, const Grid& grid, bool bfloat16,
                               cudaStream_t stream) {
  return bfloat16 ? launch_kernel<__nv_bfloat16, C>(p, d, grid, stream)
                  : launch_kernel<__half, C>(p, d, grid, stream);
}

}  // namespace flashonnx::decode

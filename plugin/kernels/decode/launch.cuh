// Launches the kernel of one tiling, for both element types.
#pragma once

#include <cuda_runtime.h>

#include "kernels/decode/kernel.cuh"
#include "kernels/decode/launch.h"

namespace flashonnx::decode {

template <class T, class C>
flashonnx_status launch_kernel(const Problem& p, Decode d, const Grid& grid, cudaStream_t stream) {
  const auto kernel = attend<T, C>;
  // Per device, so not once per process; it only writes a field of the loaded function.
  FLASHONNX_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            static_cast<int>(grid.shared_limit)));
  bool hopper = false;
  FLASHONNX_RETURN_IF_ERROR(has_hopper_code(reinterpret_cast<const void*>(kernel), &hopper));
  cudaLaunchAttribute attributes[3] = {};
  cudaLaunchConfig_t config = {};
  config.blockDim = dim3(32 * d.warps);
  config.dynamicSmemBytes = grid.shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  cudaLaunchAttribute& carveout = attributes[config.numAttrs++];
  carveout.id = cudaLaunchAttributePreferredSharedMemoryCarveout;
  carveout.val.sharedMemCarveout = cudaSharedmemCarveoutMaxShared;
  if (hopper && grid.overlap) {
    cudaLaunchAttribute& overlap = attributes[config.numAttrs++];
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
  }
  int64_t size = hopper ? grid.cluster : 1;
  cudaLaunchAttribute& cluster = attributes[config.numAttrs];
  if (size > 1) {
    ++config.numAttrs;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  }
  // A cluster has to find room in one part of the device, of which few are of a size that divides
  // well: a cluster that comes second takes as long again.
  for (int resident = 0; size > 1; --size) {
    cluster.val.clusterDim.x = static_cast<unsigned>(size);
    config.gridDim = dim3(static_cast<unsigned>(grid.units * size * grid.partitions));
    if (!grid.adaptable) break;
    FLASHONNX_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&resident, kernel, &config));
    if (resident >= grid.units) break;
  }
  if (size == 1) {
    cluster.val.clusterDim.x = 1;
    config.gridDim = dim3(static_cast<unsigned>(grid.units * grid.partitions));
  }
  d.cluster = Divider(static_cast<uint32_t>(size));
  d.parts = Divider(static_cast<uint32_t>(size * grid.partitions));
  return cuda_status(cudaLaunchKernelEx(&config, kernel, p, d), "decode attention kernel");
}

template <class C>
flashonnx_status launch_tiling(const Problem& p, const Decode& d, const Grid& grid, bool bfloat16,
                               cudaStream_t stream) {
  return bfloat16 ? launch_kernel<__nv_bfloat16, C>(p, d, grid, stream)
                  : launch_kernel<__half, C>(p, d, grid, stream);
}

}  // namespace flashonnx::decode

// Launches the kernel of one tiling, for both element types.
#pragma once

#include <cuda_runtime.h>

#include "kernels/decode/kernel.cuh"
#include "kernels/decode/launch.h"
#include "kernels/decode/shares.cuh"

namespace flashonnx::decode {

template <class T, class C>
flashonnx_status launch_shares(const Problem& p, const Decode& d, const Grid& grid,
                               cudaStream_t stream) {
  const auto kernel = attend_shares<T, C>;
  FLASHONNX_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            static_cast<int>(grid.shared_limit)));
  bool hopper = false;
  FLASHONNX_RETURN_IF_ERROR(has_hopper_code(reinterpret_cast<const void*>(kernel), &hopper));
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributePreferredSharedMemoryCarveout;
  attributes[0].val.sharedMemCarveout = cudaSharedmemCarveoutMaxShared;
  attributes[1] = overlap_attribute();
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(grid.blocks));
  config.blockDim = dim3(32 * d.warps);
  config.dynamicSmemBytes = grid.shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = hopper && grid.overlap ? 2 : 1;
  return cuda_status(cudaLaunchKernelEx(&config, kernel, p, d), "decode attention kernel");
}

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
  attributes[0].id = cudaLaunchAttributePreferredSharedMemoryCarveout;
  attributes[0].val.sharedMemCarveout = cudaSharedmemCarveoutMaxShared;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {1, 1, 1};
  attributes[2] = overlap_attribute();

  // A cluster has to find room in one part of the device, whose sizes are uneven: one that comes
  // second takes as long again as all that came first.
  unsigned size = hopper ? static_cast<unsigned>(grid.cluster) : 1;
  const auto set_size = [&] {
    attributes[1].val.clusterDim.x = size;
    config.numAttrs = size > 1 ? 2 : 1;
    config.gridDim = dim3(static_cast<unsigned>(grid.units * grid.partitions) * size);
  };
  set_size();
  for (int resident = 0; grid.adaptable && size > 1; --size, set_size()) {
    FLASHONNX_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&resident, kernel, &config));
    if (resident >= grid.units) break;
  }
  // Clusters of blocks that have a multiprocessor each find no room beside others of their kind.
  const bool room = grid.room || size <= 2 || 2 * grid.shared_bytes < grid.shared_limit;
  if (hopper && grid.overlap && room) {
    if (size == 1) attributes[1] = attributes[2];
    ++config.numAttrs;
  }
  d.cluster = Divider(size);
  d.parts = Divider(static_cast<uint32_t>(size * grid.partitions));
  return cuda_status(cudaLaunchKernelEx(&config, kernel, p, d), "decode attention kernel");
}

template <class C>
flashonnx_status launch_tiling(const Problem& p, const Decode& d, const Grid& grid, bool bfloat16,
                               cudaStream_t stream) {
  if constexpr (C::kRowTiles == 1) {
    if (grid.blocks > 0)
      return bfloat16 ? launch_shares<__nv_bfloat16, C>(p, d, grid, stream)
                      : launch_shares<__half, C>(p, d, grid, stream);
  }
  return bfloat16 ? launch_kernel<__nv_bfloat16, C>(p, d, grid, stream)
                  : launch_kernel<__half, C>(p, d, grid, stream);
}

}  // namespace flashonnx::decode

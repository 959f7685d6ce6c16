// How a multiprocessor divides its memory between the first-level cache and shared memory: in one
// way at a time. A block of a kernel that asks for another way waits until all others there are
// done; so kernels that are to run beside one another ask for the same, the most shared memory.
#pragma once

#include <cuda_runtime_api.h>

namespace flashonnx {

inline cudaLaunchAttribute shared_memory_attribute() {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributePreferredSharedMemoryCarveout;
  attribute.val.sharedMemCarveout = cudaSharedmemCarveoutMaxShared;
  return attribute;
}

}  // namespace flashonnx

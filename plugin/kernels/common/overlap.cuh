// Overlap of launches (programmatic dependent launch, compute capability 9.0): a kernel's blocks
// may take their places while the kernel before it on the stream still runs. Each kernel that is
// launched so waits for that one's end by itself, so a chain of them keeps its order.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/common/cuda.h"

namespace flashonnx {

// Kernels that follow may be launched while this one still runs.
__device__ __forceinline__ void let_dependents_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Until all that the kernel before wrote is there, if this launch may have begun earlier. Nothing
// else.
__device__ __forceinline__ void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Whether what runs here of a kernel is code for compute capability 9.0, which knows clusters and
// waits for the kernel before it: on any device it may also be PTX for an older one.
inline flashonnx_status has_hopper_code(const void* kernel, bool* has) {
  cudaFuncAttributes attributes = {};
  FLASHONNX_CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel));
  *has = attributes.ptxVersion >= 90;
  return ok();
}

// Graphs hold such launches from CUDA 12.3 on.
inline flashonnx_status driver_overlaps(bool* overlaps) {
  constexpr int kDriver = 12030;
  int driver = 0;
  FLASHONNX_CUDA_CHECK(cudaDriverGetVersion(&driver));
  *overlaps = driver >= kDriver;
  return ok();
}

// For a launch that may begin early.
inline cudaLaunchAttribute overlap_attribute() {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}

}  // namespace flashonnx

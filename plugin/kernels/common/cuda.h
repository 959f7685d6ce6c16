// CUDA calls as statuses, and the device a stream lives on. Included by host code of the CUDA
// kernels only.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/common/status.h"

namespace flashonnx {

inline flashonnx_status cuda_status(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return ok();
  return make_status(FLASHONNX_RUNTIME_ERROR, "%s: %s", what, cudaGetErrorString(error));
}

// A stream accepts launches only while its own device is the calling thread's current one
// (onnxruntime PR 24192).
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    if (cudaGetDevice(&previous_) != cudaSuccess) previous_ = -1;
    if (previous_ != device) error_ = cudaSetDevice(device);
    restore_ = previous_ >= 0 && previous_ != device;
  }
  ~DeviceGuard() {
    if (restore_) (void)cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  flashonnx_status status() const { return cuda_status(error_, "cudaSetDevice"); }

 private:
  int previous_ = -1;
  bool restore_ = false;
  cudaError_t error_ = cudaSuccess;
};

}  // namespace flashonnx

#define FLASHONNX_CUDA_CHECK(call) \
  FLASHONNX_RETURN_IF_ERROR(::flashonnx::cuda_status((call), #call))

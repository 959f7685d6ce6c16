// What the adapter's files share: one version of ONNX Runtime's C API, its statuses and handles.
#pragma once

#include <onnxruntime_c_api.h>

#include <exception>
#include <memory>

#include "kernels/common/status.h"

namespace flashonnx::ort {

// The oldest API that has all we call. Runtimes refuse an OrtCustomOp newer than they are, so this
// is a number of ours and not the headers' ORT_API_VERSION.
inline constexpr uint32_t kApiVersion = 20;
static_assert(ORT_API_VERSION >= kApiVersion, "ONNX Runtime headers 1.20 or newer are needed");

inline OrtErrorCode error_code(int32_t code) {
  if (code == FLASHONNX_INVALID_ARGUMENT) return ORT_INVALID_ARGUMENT;
  if (code == FLASHONNX_NOT_IMPLEMENTED) return ORT_NOT_IMPLEMENTED;
  return ORT_RUNTIME_EXCEPTION;
}

// A status of ours as one of ONNX Runtime's: null if it is OK.
inline OrtStatus* to_ort(const OrtApi& api, const flashonnx_status& status) {
  if (status.code == FLASHONNX_OK) return nullptr;
  return api.CreateStatus(error_code(status.code), status.message);
}

// Calls a function that returns an OrtStatus*, at the boundary that no exception may cross.
template <typename Function>
OrtStatus* guarded(const OrtApi& api, Function function) noexcept {
  try {
    return function();
  } catch (const std::exception& error) {
    return api.CreateStatus(ORT_RUNTIME_EXCEPTION, error.what());
  } catch (...) {
    return api.CreateStatus(ORT_RUNTIME_EXCEPTION, "FlashAttention: unknown exception");
  }
}

// True if the call succeeded; a failure's status is released.
inline bool succeeded(const OrtApi& api, OrtStatus* status) {
  if (status == nullptr) return true;
  api.ReleaseStatus(status);
  return false;
}

template <typename T>
using Handle = std::unique_ptr<T, void(ORT_API_CALL*)(T*)>;

}  // namespace flashonnx::ort

#define FLASHONNX_ORT_RETURN_IF_ERROR(expression) \
  if (OrtStatus* status_ = (expression)) return status_

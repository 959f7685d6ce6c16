// A node of a session, and what running it takes.
#pragma once

#include "flashonnx/attention.h"
#include "ort/attributes.h"

namespace flashonnx::ort {

// The operator's inputs and outputs, in their order.
enum Input { kQ, kK, kV, kMask, kPastKey, kPastValue, kLengths, kSinks, kInputs };
enum Output { kY, kPresentKey, kPresentValue, kLse, kOutputs };

// Runs of a node may overlap, so nothing here changes after its making.
struct Kernel {
  const OrtApi& api;
  int32_t kind;  // FLASHONNX_CPU or FLASHONNX_CUDA
  int32_t dtype;
  Attributes attributes;
};

int32_t dtype_of(ONNXTensorElementDataType type);

OrtStatus* run(const Kernel& kernel, OrtKernelContext* context);

}  // namespace flashonnx::ort

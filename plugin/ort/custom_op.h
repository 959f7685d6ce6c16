// The operators as ONNX Runtime sees them: one OrtCustomOp for each operator, execution provider
// and element type. The adapter only translates: attributes and tensors to the seam's struct,
// statuses back.
#pragma once

#include <vector>

#include "ort/api.h"

namespace flashonnx::ort {

struct Operator;

struct CustomOp : OrtCustomOp {
  const OrtApi* api;
  const Operator* definition;
  ONNXTensorElementDataType element;
  const char* provider;  // null: CPU
};

// All overloads of all operators. They have to outlive every session that knows them.
std::vector<CustomOp> custom_ops(const OrtApi& api);

}  // namespace flashonnx::ort

// flashonnx::FlashAttention as ONNX Runtime sees it: one OrtCustomOp for each execution provider
// and element type. The adapter only translates: attributes and tensors to the seam's struct,
// statuses back.
#pragma once

#include <vector>

#include "ort/api.h"

namespace flashonnx::ort {

struct AttentionOp : OrtCustomOp {
  const OrtApi* api;
  ONNXTensorElementDataType element;
  const char* provider;  // null: CPU
};

// All overloads of the operator. They have to outlive every session that knows them.
std::vector<AttentionOp> attention_ops(const OrtApi& api);

}  // namespace flashonnx::ort

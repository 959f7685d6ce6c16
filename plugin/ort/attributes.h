// The attributes of the operators from ONNX Runtime.
#pragma once

#include "operator/attributes.h"
#include "ort/api.h"

namespace flashonnx::ort {

// Reads and checks a node's attributes. ONNX Runtime checks neither their types nor their values.
// Those that the operator does not have are absent; `is_causal`: the default, where it is.
OrtStatus* read_attributes(const OrtApi& api, const OrtKernelInfo& info, int64_t is_causal,
                           Attributes* attributes);

// The layout and head counts for shape inference. Leaves what is absent or malformed at its
// default: creating the kernel will complain.
Attributes peek_attributes(const OrtApi& api, const OrtShapeInferContext& context);

}  // namespace flashonnx::ort

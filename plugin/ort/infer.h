// Shape inference: output shapes from input shapes that are known only in part.
#pragma once

#include "ort/api.h"

namespace flashonnx::ort {

// Sets what can be known. Contradictions are left to the run, whose errors name the input.
void infer_output_shapes(const OrtApi& api, OrtShapeInferContext* context);

}  // namespace flashonnx::ort

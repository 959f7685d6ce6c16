// Shape inference: output shapes from input shapes that are known only in part.
#pragma once

#include "ort/api.h"

namespace flashonnx::ort {

// Each sets what can be known. Contradictions are left to the run, whose errors name the input.
void infer_attention(const OrtApi& api, OrtShapeInferContext* context);
void infer_cache(const OrtApi& api, OrtShapeInferContext* context);
void infer_varlen(const OrtApi& api, OrtShapeInferContext* context);

}  // namespace flashonnx::ort

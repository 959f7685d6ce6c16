// A node of a session, and what tells its operator from the others.
#pragma once

#include <cstddef>
#include <cstdint>

#include "flashonnx/attention.h"
#include "ort/attributes.h"

namespace flashonnx::ort {

struct Kernel;

// An input or output of an operator.
struct Port {
  enum Type {
    kElement,  // T: that of Q
    kFloat,
    kInt32,
    kInt64,
    // Several types are valid: overloads for each of them would refuse a float32 mask with float16
    // queries. The run checks it.
    kAny,
  };
  Type type;
  bool required;
};

struct Operator {
  const char* name;
  const Port* inputs;
  size_t input_count;
  const Port* outputs;
  size_t output_count;
  int64_t is_causal;  // the attribute's default
  OrtStatus* (*run)(const Kernel& kernel, OrtKernelContext* context);
  // Sets what can be known of the outputs' shapes. Contradictions are left to the run, whose errors
  // name the input.
  void (*infer)(const OrtApi& api, OrtShapeInferContext* context);
  // Outputs that may be written where an input stands: see OrtCustomOp::GetMayInplace. Null: none.
  size_t(ORT_API_CALL* in_place)(int** inputs, int** outputs);
};

extern const Operator kAttention, kCache, kVarlen;

// Runs of a node may overlap, so nothing here changes after its making.
struct Kernel {
  const OrtApi& api;
  const Operator& op;
  int32_t kind;  // FLASHONNX_CPU or FLASHONNX_CUDA
  int32_t dtype;
  Attributes attributes;
};

int32_t dtype_of(ONNXTensorElementDataType type);

}  // namespace flashonnx::ort

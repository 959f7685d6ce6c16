// A node of a TensorRT network: its operator and attributes, which of the operator's tensors it
// has, and its translation into the seam's struct. Knows nothing of TensorRT's types.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>

#include "flashonnx/attention.h"
#include "operator/attributes.h"
#include "operator/geometry.h"

namespace flashonnx::trt {

// What a tensor of an operator may be, beside queries of type T. TensorRT has no boolean plugin
// tensors.
enum class Type {
  kQ,     // float32, float16 or bfloat16: it is T
  kSame,  // T
  kFloat,
  kTable,    // float32 or T
  kMask,     // T, float32, int8 or int32
  kInteger,  // int32 or int64
  kInt32,
  kInt64,
};

struct Port {
  const char* name;
  Type type;
  flashonnx_tensor flashonnx_attention_params::* field;  // what it is to the seam
};

inline constexpr int32_t kMaxInputs = 13;
inline constexpr int32_t kMaxOutputs = 4;

struct Node;
struct Tensor {
  Shape shape;
  int32_t dtype = FLASHONNX_NONE;
  void* data = nullptr;
};

// Each absent one has dtype FLASHONNX_NONE.
using InputTensors = std::array<Tensor, kMaxInputs>;
using OutputTensors = std::array<Tensor, kMaxOutputs>;

// What tells an operator from the others. Its inputs and outputs stand in ONNX order. A TensorRT
// node has only those that are present (the parser refuses empty names), so the node says in its
// attributes `inputs` and `outputs` which they are.
struct Operator {
  const char* name;
  std::span<const Port> inputs;
  std::span<const Port> outputs;
  int64_t is_causal;  // the attribute's default
  // The inputs of a node that does not say.
  const char* (*usual_inputs)(const Attributes& attributes);
  // INVALID_ARGUMENT if inputs or outputs are missing, or should be.
  flashonnx_status (*check_presence)(const Node& node);
  // Everything but the device. Outputs need no shapes: theirs follow from the inputs.
  flashonnx_status (*fill_params)(const Node& node, const InputTensors& inputs,
                                  const OutputTensors& outputs, Sizes sizes,
                                  flashonnx_attention_params* params);
};

extern const Operator kAttention, kCache, kVarlen;

namespace attention {
enum Input { kQ, kK, kV, kMask, kPastKey, kPastValue, kLengths, kSinks, kBias };
enum Output { kY, kPresentKey, kPresentValue, kLse };
}  // namespace attention

namespace cache {
enum Input {
  kQ,
  kK,
  kV,
  kKeyCache,
  kValueCache,
  kLengths,
  kBlockTable,
  kSequences,
  kCos,
  kSin,
  kPositions,
  kMask,
  kSinks
};
enum Output { kY, kPresentKey, kPresentValue, kLse };
}  // namespace cache

namespace varlen {
enum Input { kQ, kK, kV, kSequencesQ, kSequencesK, kSinks };
enum Output { kY, kLse };
}  // namespace varlen

// The operator's attributes, TensorRT's additions to them, and what an engine has to remember
// besides.
struct PluginAttributes : NodeAttributes {
  std::string inputs;              // comma-separated names; empty: the operator's usual ones
  std::string outputs = "Y";       // likewise
  int64_t planned_workspace = -1;  // bytes the engine was planned with; -1: not known
};

struct Node {
  const Operator* op = &kAttention;
  PluginAttributes given;
  Attributes attributes;
  // The first input_count: positions among the operator's inputs, in the node's order.
  std::array<int32_t, kMaxInputs> inputs{};
  std::array<int32_t, kMaxOutputs> outputs{};
  int32_t input_count = 0;
  int32_t output_count = 0;

  bool has_input(int32_t input) const;
  bool has_output(int32_t output) const;
};

// The node, or INVALID_ARGUMENT / NOT_IMPLEMENTED naming the attribute, what was expected and what
// came.
flashonnx_status make_node(const Operator& op, const PluginAttributes& attributes, Node* node);

}  // namespace flashonnx::trt

// A FlashAttention node of a TensorRT network: its attributes, which of the operator's tensors it
// has, and its translation into the seam's struct. Knows nothing of TensorRT's types.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "flashonnx/attention.h"
#include "operator/attributes.h"
#include "operator/geometry.h"

namespace flashonnx::trt {

// The operator's inputs and outputs in ONNX order. A TensorRT node has only those that are present
// (the parser refuses empty names), so the node says in its attributes `inputs` and `outputs` which
// they are.
enum Input { kQ, kK, kV, kMask, kPastKey, kPastValue, kLengths, kSinks, kInputs };
enum Output { kY, kPresentKey, kPresentValue, kLse, kOutputs };

inline constexpr const char* kInputNames[kInputs] = {
    "Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen", "sinks"};
inline constexpr const char* kOutputNames[kOutputs] = {"Y", "present_key", "present_value", "lse"};

// The operator's attributes, TensorRT's additions to them, and what an engine has to remember
// besides.
struct PluginAttributes : NodeAttributes {
  std::string inputs;              // comma-separated names; empty: Q,K,V, or Q with a packed layout
  std::string outputs = "Y";       // likewise
  int64_t planned_workspace = -1;  // bytes the engine was planned with; -1: not known
};

struct Tensor {
  Shape shape;
  int32_t dtype = FLASHONNX_NONE;
  void* data = nullptr;
};

// Each absent one has dtype FLASHONNX_NONE.
using InputTensors = std::array<Tensor, kInputs>;
using OutputTensors = std::array<Tensor, kOutputs>;

struct Node {
  PluginAttributes given;
  Attributes attributes;
  std::array<int32_t, kInputs>
      inputs{};  // the first input_count: Input values, in the node's order
  std::array<int32_t, kOutputs> outputs{};
  int32_t input_count = 0;
  int32_t output_count = 0;

  bool has_input(Input input) const;
};

// The node, or INVALID_ARGUMENT / NOT_IMPLEMENTED naming the attribute, what was expected and what
// came.
flashonnx_status make_node(const PluginAttributes& attributes, Node* node);

// Everything but the device. Outputs need no shapes: theirs follow from the inputs.
flashonnx_status fill_params(const Node& node, const InputTensors& inputs,
                             const OutputTensors& outputs, Sizes sizes,
                             flashonnx_attention_params* params);

}  // namespace flashonnx::trt

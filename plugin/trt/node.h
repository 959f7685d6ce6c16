// A FlashAttention node as its attributes and dense tensors, and its translation into the seam's
// struct. Knows nothing of TensorRT: what the attributes mean is written here once, shapes and
// kernels follow it.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <string>

#include "flashonnx/attention.h"

namespace flashonnx::trt {

// The operator's inputs and outputs in ONNX order. A TensorRT node has only those that are present
// (the parser refuses empty names), so the node says in its attributes `inputs` and `outputs` which
// they are.
enum Input { kQ, kK, kV, kMask, kPastKey, kPastValue, kKeyLengths, kSinks, kInputs };
enum Output { kY, kPresentKey, kPresentValue, kLse, kOutputs };

inline constexpr const char* kInputNames[kInputs] = {
    "Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen", "sinks"};
inline constexpr const char* kOutputNames[kOutputs] = {"Y", "present_key", "present_value", "lse"};

inline constexpr int32_t kNoHeads = -1;  // a number of heads that is not given

enum class Layout { kSeparate, k3hd, kH3d, kGqa, kTimeMajor };

// The attributes as they are written on the node, and what an engine has to remember besides.
struct Attributes {
  int32_t is_causal = 0;
  int32_t q_num_heads = kNoHeads;
  int32_t kv_num_heads = kNoHeads;
  float scale = std::numeric_limits<float>::quiet_NaN();  // NaN: not given, 1 / sqrt(D)
  float softcap = 0;
  int32_t left_window_size = -1;
  int32_t right_window_size = -1;
  int32_t softmax_precision = 0;  // an ONNX data type; 0: not given
  std::string empty_row = "zero";
  std::string qkv_layout = "separate";
  std::string inputs;              // comma-separated names; empty: Q,K,V, or Q with a packed layout
  std::string outputs = "Y";       // likewise
  int64_t planned_workspace = -1;  // bytes the engine was planned with; -1: not known
};

struct DenseTensor {
  void* data = nullptr;
  int32_t dtype = FLASHONNX_NONE;  // FLASHONNX_NONE: absent
  int32_t rank = 0;
  std::array<int64_t, 8> dims{};
};

using Inputs = std::array<DenseTensor, kInputs>;
using Outputs = std::array<DenseTensor, kOutputs>;

// Which tensors a TensorRT node has, in its order.
struct Node {
  Attributes attributes;
  Layout layout = Layout::kSeparate;
  std::array<int32_t, kInputs> inputs{};  // the first input_count: Input values
  std::array<int32_t, kOutputs> outputs{};
  int32_t input_count = 0;
  int32_t output_count = 0;

  bool has_input(Input input) const;
  bool has_output(Output output) const;
  bool packed() const { return layout != Layout::kSeparate; }
};

// The node, or INVALID_ARGUMENT / NOT_IMPLEMENTED naming the attribute, what was expected and what
// came.
flashonnx_status make_node(const Attributes& attributes, Node* node);

enum class Sizes {
  kExact,   // sizes must agree with each other
  kMaxima,  // upper bounds, of which each size takes the largest: bounds of derived shapes may be
            // loose
};

// Everything but the device. Output tensors need no shape: theirs follows from the inputs.
flashonnx_status fill_params(const Node& node, const Inputs& inputs, const Outputs& outputs,
                             Sizes sizes, flashonnx_attention_params* params);

}  // namespace flashonnx::trt

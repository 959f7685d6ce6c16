// The attributes of the operators, whichever runtime they come from.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "flashonnx/status.h"

namespace flashonnx {

// Where queries, keys and values stand (attribute qkv_layout).
enum class Layout {
  kSeparate,   // Q, K and V: (B, S, H*D) each, or (B, H, S, D) each
  k3hd,        // Q alone: (B, S, 3, H, D) or (B, S, 3*H*D)
  kH3d,        // Q alone: (B, S, H, 3, D) or (B, S, H*3*D)
  kGqa,        // Q alone: (B, S, (Hq + 2*Hkv)*D)
  kTimeMajor,  // Q alone: (S, B, 3*H*D); Y is (S, B, H*D)
};

const char* layout_name(Layout layout);
bool find_layout(const std::string& name, Layout* layout);

// As they are written on a node. What is not given keeps its default, or is empty.
struct NodeAttributes {
  int64_t is_causal = 0;
  std::optional<int64_t> q_num_heads;
  std::optional<int64_t> kv_num_heads;
  std::optional<float> scale;
  float softcap = 0;
  int64_t left_window_size = -1;
  int64_t right_window_size = -1;
  int64_t softmax_precision = 0;
  std::string empty_row = "zero";
  std::string qkv_layout = "separate";
  // Of FlashAttentionKVCache and FlashAttentionVarlen alone:
  int64_t rotary_interleaved = 0;
  int64_t rotary_dim = 0;
  int64_t fixed_split = 0;
  int64_t max_q_length = 0;
  int64_t max_kv_length = 0;
};

// What they mean.
struct Attributes {
  Layout layout = Layout::kSeparate;
  int64_t is_causal = 0;
  int64_t q_num_heads = 0;   // 0: not given
  int64_t kv_num_heads = 0;  // 0: not given
  float scale = 0;           // 0: not given, 1 / sqrt(D)
  float softcap = 0;         // 0: none
  int64_t left_window_size = -1;
  int64_t right_window_size = -1;
  int32_t empty_row = 0;  // FLASHONNX_EMPTY_ROW_*
  int64_t rotary_interleaved = 0;
  int64_t rotary_dim = 0;  // 0: twice the tables' width
  int32_t fixed_split = 0;
  int64_t max_q_length = 0;  // 0: unknown
  int64_t max_kv_length = 0;
};

// INVALID_ARGUMENT or NOT_IMPLEMENTED name the attribute, what was expected and what came.
flashonnx_status interpret(const NodeAttributes& node, Attributes* attributes);

}  // namespace flashonnx

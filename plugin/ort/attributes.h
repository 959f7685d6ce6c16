// The attributes of flashonnx::FlashAttention.
#pragma once

#include <cstdint>

#include "ort/api.h"

namespace flashonnx::ort {

// Where queries, keys and values stand (attribute qkv_layout).
enum class Layout {
  kSeparate,   // Q, K and V: (B, S, H*D) each, or (B, H, S, D) each
  k3hd,        // Q alone: (B, S, 3, H, D) or (B, S, 3*H*D)
  kH3d,        // Q alone: (B, S, H, 3, D) or (B, S, H*3*D)
  kGqa,        // Q alone: (B, S, (Hq + 2*Hkv)*D)
  kTimeMajor,  // Q alone: (S, B, 3*H*D); Y is (S, B, H*D)
};

const char* layout_name(Layout layout);

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
};

// Reads and checks a node's attributes. ONNX Runtime checks neither their types nor their values.
OrtStatus* read_attributes(const OrtApi& api, const OrtKernelInfo& info, Attributes* attributes);

// The layout and head counts for shape inference. Leaves what is absent or malformed at its
// default: creating the kernel will complain.
Attributes peek_attributes(const OrtApi& api, const OrtShapeInferContext& context);

}  // namespace flashonnx::ort

#include "operator/attributes.h"

#include <cmath>
#include <iterator>

#include "flashonnx/attention.h"
#include "kernels/common/status.h"

namespace flashonnx {
namespace {

constexpr const char* kLayoutNames[] = {"separate", "3hd", "h3d", "gqa", "time_major"};

flashonnx_status invalid(const char* name, const char* expected, double got) {
  return make_status(FLASHONNX_INVALID_ARGUMENT,
                     "FlashAttention: attribute '%s' is expected to be %s, got %g", name, expected,
                     got);
}

flashonnx_status invalid(const char* name, const char* expected, int64_t got) {
  return invalid(name, expected, static_cast<double>(got));
}

flashonnx_status invalid(const char* name, const char* expected, const std::string& got) {
  return make_status(FLASHONNX_INVALID_ARGUMENT,
                     "FlashAttention: attribute '%s' is expected to be %s, got \"%.60s\"", name,
                     expected, got.c_str());
}

flashonnx_status interpret_heads(const char* name, std::optional<int64_t> given, int64_t* heads) {
  if (given.value_or(1) < 1) return invalid(name, "at least 1", *given);
  *heads = given.value_or(0);
  return ok();
}

flashonnx_status interpret_switch(const char* name, int64_t given, int64_t* value) {
  if (given != 0 && given != 1) return invalid(name, "0 or 1", given);
  *value = given;
  return ok();
}

flashonnx_status interpret_bound(const char* name, int64_t given, int64_t* value) {
  if (given < 0) return invalid(name, "0 (unknown) or positive", given);
  *value = given;
  return ok();
}

flashonnx_status interpret_window(const char* name, int64_t given, int64_t* window) {
  if (given < -1) return invalid(name, "-1 (no bound) or at least 0", given);
  *window = given;
  return ok();
}

flashonnx_status interpret_scale(std::optional<float> given, float* scale) {
  const float value = given.value_or(1);
  if (!(value > 0) || std::isinf(value)) return invalid("scale", "positive and finite", value);
  *scale = given.value_or(0);
  return ok();
}

flashonnx_status check_precision(int64_t precision) {
  constexpr int64_t kDouble = 11;
  if (precision == kDouble) {
    return make_status(
        FLASHONNX_NOT_IMPLEMENTED,
        "FlashAttention: attribute 'softmax_precision' is expected to be 1 (float32), "
        "10 (float16) or 16 (bfloat16), got 11 (double): softmax runs in float32");
  }
  if (precision == 0 || precision == 1 || precision == 10 || precision == 16) return ok();
  return invalid("softmax_precision", "1 (float32), 10 (float16) or 16 (bfloat16)", precision);
}

}  // namespace

const char* layout_name(Layout layout) { return kLayoutNames[static_cast<size_t>(layout)]; }

bool find_layout(const std::string& name, Layout* layout) {
  for (size_t i = 0; i < std::size(kLayoutNames); ++i) {
    if (name != kLayoutNames[i]) continue;
    *layout = static_cast<Layout>(i);
    return true;
  }
  return false;
}

flashonnx_status interpret(const NodeAttributes& node, Attributes* a) {
  if (!find_layout(node.qkv_layout, &a->layout)) {
    return invalid("qkv_layout", "one of separate, 3hd, h3d, gqa, time_major", node.qkv_layout);
  }
  if (node.empty_row != "zero" && node.empty_row != "mean") {
    return invalid("empty_row", "\"zero\" or \"mean\"", node.empty_row);
  }
  a->empty_row = node.empty_row == "mean" ? FLASHONNX_EMPTY_ROW_MEAN : FLASHONNX_EMPTY_ROW_ZERO;
  FLASHONNX_RETURN_IF_ERROR(interpret_switch("is_causal", node.is_causal, &a->is_causal));
  FLASHONNX_RETURN_IF_ERROR(interpret_heads("q_num_heads", node.q_num_heads, &a->q_num_heads));
  FLASHONNX_RETURN_IF_ERROR(interpret_heads("kv_num_heads", node.kv_num_heads, &a->kv_num_heads));
  FLASHONNX_RETURN_IF_ERROR(
      interpret_window("left_window_size", node.left_window_size, &a->left_window_size));
  FLASHONNX_RETURN_IF_ERROR(
      interpret_window("right_window_size", node.right_window_size, &a->right_window_size));
  FLASHONNX_RETURN_IF_ERROR(interpret_scale(node.scale, &a->scale));
  if (!(node.softcap >= 0) || std::isinf(node.softcap)) {
    return invalid("softcap", "0 (none) or positive and finite", node.softcap);
  }
  a->softcap = node.softcap;
  FLASHONNX_RETURN_IF_ERROR(
      interpret_switch("rotary_interleaved", node.rotary_interleaved, &a->rotary_interleaved));
  if (node.rotary_dim < 0 || node.rotary_dim % 2 != 0)
    return invalid("rotary_dim", "0 (by the tables' width) or positive and even", node.rotary_dim);
  a->rotary_dim = node.rotary_dim;
  int64_t fixed_split = 0;
  FLASHONNX_RETURN_IF_ERROR(interpret_switch("fixed_split", node.fixed_split, &fixed_split));
  a->fixed_split = static_cast<int32_t>(fixed_split);
  FLASHONNX_RETURN_IF_ERROR(interpret_bound("max_q_length", node.max_q_length, &a->max_q_length));
  FLASHONNX_RETURN_IF_ERROR(
      interpret_bound("max_kv_length", node.max_kv_length, &a->max_kv_length));
  return check_precision(node.softmax_precision);
}

}  // namespace flashonnx

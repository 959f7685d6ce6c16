#include "ort/attributes.h"

#include <cmath>
#include <iterator>
#include <optional>
#include <string>

#include "flashonnx/attention.h"

namespace flashonnx::ort {
namespace {

constexpr const char* kLayoutNames[] = {"separate", "3hd", "h3d", "gqa", "time_major"};

bool find_layout(const std::string& name, Layout* layout) {
  for (size_t i = 0; i < std::size(kLayoutNames); ++i) {
    if (name != kLayoutNames[i]) continue;
    *layout = static_cast<Layout>(i);
    return true;
  }
  return false;
}

template <typename T>
constexpr const char* kTypeName = "a string";
template <>
constexpr const char* kTypeName<int64_t> = "an integer";
template <>
constexpr const char* kTypeName<float> = "a float";

class Reader {
 public:
  Reader(const OrtApi& api, const OrtKernelInfo& info) : api_(api), info_(info) {}

  // Leaves `value` empty if there is no such attribute.
  template <typename T>
  flashonnx_status read(const char* name, std::optional<T>* value) const {
    T found{};
    if (!get(name, &found)) return absent(name, kTypeName<T>);
    *value = found;
    return ok();
  }

  // Leaves `value` as it is if there is no such attribute.
  template <typename T>
  flashonnx_status read(const char* name, T* value) const {
    std::optional<T> found;
    FLASHONNX_RETURN_IF_ERROR(read(name, &found));
    if (found) *value = *found;
    return ok();
  }

 private:
  bool get(const char* name, int64_t* value) const {
    return succeeded(api_, api_.KernelInfoGetAttribute_int64(&info_, name, value));
  }
  bool get(const char* name, float* value) const {
    return succeeded(api_, api_.KernelInfoGetAttribute_float(&info_, name, value));
  }
  bool get(const char* name, std::string* value) const {
    size_t size = 0;
    if (!succeeded(api_, api_.KernelInfoGetAttribute_string(&info_, name, nullptr, &size))) {
      return false;
    }
    value->resize(size);
    if (!succeeded(api_, api_.KernelInfoGetAttribute_string(&info_, name, value->data(), &size))) {
      return false;
    }
    value->resize(size - 1);  // the size counts the final zero
    return true;
  }

  // ONNX Runtime answers alike for an absent attribute and for one of another type; the latter must
  // not pass for the former.
  flashonnx_status absent(const char* name, const char* expected) const {
    int64_t integer;
    float real;
    std::string text;
    size_t count = 0;
    const char* got = nullptr;
    if (get(name, &integer)) got = "an integer";
    if (get(name, &real)) got = "a float";
    if (get(name, &text)) got = "a string";
    if (succeeded(api_, api_.KernelInfoGetAttributeArray_int64(&info_, name, nullptr, &count)) ||
        succeeded(api_, api_.KernelInfoGetAttributeArray_float(&info_, name, nullptr, &count))) {
      got = "a list";
    }
    if (got == nullptr) return ok();
    return make_status(FLASHONNX_INVALID_ARGUMENT,
                       "FlashAttention: attribute '%s' is expected to be %s, got %s", name,
                       expected, got);
  }

  const OrtApi& api_;
  const OrtKernelInfo& info_;
};

flashonnx_status invalid(const char* name, const char* expected, double got) {
  return make_status(FLASHONNX_INVALID_ARGUMENT,
                     "FlashAttention: attribute '%s' is expected to be %s, got %g", name, expected,
                     got);
}

flashonnx_status invalid(const char* name, const char* expected, const std::string& got) {
  return make_status(FLASHONNX_INVALID_ARGUMENT,
                     "FlashAttention: attribute '%s' is expected to be %s, got \"%.60s\"", name,
                     expected, got.c_str());
}

flashonnx_status read_heads(const Reader& reader, const char* name, int64_t* heads) {
  std::optional<int64_t> value;
  FLASHONNX_RETURN_IF_ERROR(reader.read(name, &value));
  if (value && *value < 1) return invalid(name, "at least 1", static_cast<double>(*value));
  *heads = value.value_or(0);
  return ok();
}

flashonnx_status read_window(const Reader& reader, const char* name, int64_t* window) {
  FLASHONNX_RETURN_IF_ERROR(reader.read(name, window));
  if (*window >= -1) return ok();
  return invalid(name, "-1 (no bound) or at least 0", static_cast<double>(*window));
}

flashonnx_status read_scale(const Reader& reader, float* scale) {
  std::optional<float> value;
  FLASHONNX_RETURN_IF_ERROR(reader.read("scale", &value));
  if (value && (!(*value > 0) || std::isinf(*value))) {
    return invalid("scale", "positive and finite", *value);
  }
  *scale = value.value_or(0);
  return ok();
}

flashonnx_status check_precision(const Reader& reader) {
  constexpr int64_t kDouble = 11;
  int64_t precision = 0;
  FLASHONNX_RETURN_IF_ERROR(reader.read("softmax_precision", &precision));
  if (precision == kDouble) {
    return make_status(
        FLASHONNX_NOT_IMPLEMENTED,
        "FlashAttention: attribute 'softmax_precision' is expected to be 1 (float32), "
        "10 (float16) or 16 (bfloat16), got 11 (double): softmax runs in float32");
  }
  if (precision == 0 || precision == 1 || precision == 10 || precision == 16) return ok();
  return invalid("softmax_precision", "1 (float32), 10 (float16) or 16 (bfloat16)",
                 static_cast<double>(precision));
}

flashonnx_status read_all(const Reader& reader, Attributes* a) {
  std::string layout = layout_name(Layout::kSeparate);
  FLASHONNX_RETURN_IF_ERROR(reader.read("qkv_layout", &layout));
  if (!find_layout(layout, &a->layout)) {
    return invalid("qkv_layout", "one of separate, 3hd, h3d, gqa, time_major", layout);
  }
  std::string empty_row = "zero";
  FLASHONNX_RETURN_IF_ERROR(reader.read("empty_row", &empty_row));
  if (empty_row != "zero" && empty_row != "mean") {
    return invalid("empty_row", "\"zero\" or \"mean\"", empty_row);
  }
  a->empty_row = empty_row == "mean" ? FLASHONNX_EMPTY_ROW_MEAN : FLASHONNX_EMPTY_ROW_ZERO;
  FLASHONNX_RETURN_IF_ERROR(reader.read("is_causal", &a->is_causal));
  if (a->is_causal != 0 && a->is_causal != 1) {
    return invalid("is_causal", "0 or 1", static_cast<double>(a->is_causal));
  }
  FLASHONNX_RETURN_IF_ERROR(read_heads(reader, "q_num_heads", &a->q_num_heads));
  FLASHONNX_RETURN_IF_ERROR(read_heads(reader, "kv_num_heads", &a->kv_num_heads));
  FLASHONNX_RETURN_IF_ERROR(read_window(reader, "left_window_size", &a->left_window_size));
  FLASHONNX_RETURN_IF_ERROR(read_window(reader, "right_window_size", &a->right_window_size));
  FLASHONNX_RETURN_IF_ERROR(read_scale(reader, &a->scale));
  FLASHONNX_RETURN_IF_ERROR(reader.read("softcap", &a->softcap));
  if (!(a->softcap >= 0) || std::isinf(a->softcap)) {
    return invalid("softcap", "0 (none) or positive and finite", a->softcap);
  }
  return check_precision(reader);
}

void peek_heads(const OrtApi& api, const OrtShapeInferContext& context, const char* name,
                int64_t* heads) {
  const OrtOpAttr* attribute = nullptr;
  if (!succeeded(api, api.ShapeInferContext_GetAttribute(&context, name, &attribute))) return;
  int64_t value = 0;
  size_t size = 0;
  if (succeeded(api, api.ReadOpAttr(attribute, ORT_OP_ATTR_INT, &value, sizeof value, &size)) &&
      value > 0) {
    *heads = value;
  }
}

}  // namespace

const char* layout_name(Layout layout) { return kLayoutNames[static_cast<size_t>(layout)]; }

OrtStatus* read_attributes(const OrtApi& api, const OrtKernelInfo& info, Attributes* attributes) {
  return to_ort(api, read_all(Reader(api, info), attributes));
}

Attributes peek_attributes(const OrtApi& api, const OrtShapeInferContext& context) {
  Attributes attributes;
  peek_heads(api, context, "q_num_heads", &attributes.q_num_heads);
  peek_heads(api, context, "kv_num_heads", &attributes.kv_num_heads);
  const OrtOpAttr* layout = nullptr;
  char name[16] = "";  // longer ones are unknown
  size_t size = 0;
  if (succeeded(api, api.ShapeInferContext_GetAttribute(&context, "qkv_layout", &layout)) &&
      succeeded(api, api.ReadOpAttr(layout, ORT_OP_ATTR_STRING, name, sizeof name, &size))) {
    find_layout(name, &attributes.layout);
  }
  return attributes;
}

}  // namespace flashonnx::ort

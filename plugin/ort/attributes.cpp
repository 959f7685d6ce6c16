#include "ort/attributes.h"

#include <optional>
#include <string>

#include "kernels/common/status.h"

namespace flashonnx::ort {
namespace {

template <typename T>
constexpr const char* kTypeName = nullptr;
template <>
constexpr const char* kTypeName<int64_t> = "an integer";
template <>
constexpr const char* kTypeName<float> = "a float";
template <>
constexpr const char* kTypeName<std::string> = "a string";

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
    // Both calls succeed for an attribute of any type, with a count of 0 where it is another one.
    size_t floats = 0;
    (void)succeeded(api_, api_.KernelInfoGetAttributeArray_int64(&info_, name, nullptr, &count));
    (void)succeeded(api_, api_.KernelInfoGetAttributeArray_float(&info_, name, nullptr, &floats));
    if (count + floats > 0) got = "a list";
    if (got == nullptr) return ok();
    return make_status(FLASHONNX_INVALID_ARGUMENT,
                       "FlashAttention: attribute '%s' is expected to be %s, got %s", name,
                       expected, got);
  }

  const OrtApi& api_;
  const OrtKernelInfo& info_;
};

flashonnx_status read_all(const Reader& reader, int64_t is_causal, Attributes* attributes) {
  NodeAttributes node;
  node.is_causal = is_causal;
  FLASHONNX_RETURN_IF_ERROR(reader.read("qkv_layout", &node.qkv_layout));
  FLASHONNX_RETURN_IF_ERROR(reader.read("empty_row", &node.empty_row));
  FLASHONNX_RETURN_IF_ERROR(reader.read("is_causal", &node.is_causal));
  FLASHONNX_RETURN_IF_ERROR(reader.read("q_num_heads", &node.q_num_heads));
  FLASHONNX_RETURN_IF_ERROR(reader.read("kv_num_heads", &node.kv_num_heads));
  FLASHONNX_RETURN_IF_ERROR(reader.read("left_window_size", &node.left_window_size));
  FLASHONNX_RETURN_IF_ERROR(reader.read("right_window_size", &node.right_window_size));
  FLASHONNX_RETURN_IF_ERROR(reader.read("scale", &node.scale));
  FLASHONNX_RETURN_IF_ERROR(reader.read("softcap", &node.softcap));
  FLASHONNX_RETURN_IF_ERROR(reader.read("softmax_precision", &node.softmax_precision));
  FLASHONNX_RETURN_IF_ERROR(reader.read("rotary_interleaved", &node.rotary_interleaved));
  FLASHONNX_RETURN_IF_ERROR(reader.read("rotary_dim", &node.rotary_dim));
  FLASHONNX_RETURN_IF_ERROR(reader.read("fixed_split", &node.fixed_split));
  FLASHONNX_RETURN_IF_ERROR(reader.read("max_q_length", &node.max_q_length));
  FLASHONNX_RETURN_IF_ERROR(reader.read("max_kv_length", &node.max_kv_length));
  return interpret(node, attributes);
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

OrtStatus* read_attributes(const OrtApi& api, const OrtKernelInfo& info, int64_t is_causal,
                           Attributes* attributes) {
  return to_ort(api, read_all(Reader(api, info), is_causal, attributes));
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

#include "trt/fields.h"

#include <cstring>
#include <optional>
#include <string_view>
#include <variant>

#include "kernels/common/status.h"

namespace flashonnx::trt {
namespace {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

template <typename T>
using Member = T PluginAttributes::*;

enum Operators : uint32_t { kOfAttention = 1, kOfCache = 2, kOfVarlen = 4, kOfAll = 7 };

struct Field {
  const char* name;
  uint32_t operators;  // that have it
  std::variant<Member<int64_t>, Member<float>, Member<std::string>, Member<std::optional<int64_t>>,
               Member<std::optional<float>>>
      member;

  bool is_of(const Operator& op) const {
    const uint32_t bit = &op == &kAttention ? kOfAttention : &op == &kCache ? kOfCache : kOfVarlen;
    return (operators & bit) != 0;
  }
};

const Field kFields[] = {
    {"is_causal", kOfAll, &PluginAttributes::is_causal},
    {"q_num_heads", kOfAll, &PluginAttributes::q_num_heads},
    {"kv_num_heads", kOfAll, &PluginAttributes::kv_num_heads},
    {"scale", kOfAll, &PluginAttributes::scale},
    {"softcap", kOfAll, &PluginAttributes::softcap},
    {"left_window_size", kOfAll, &PluginAttributes::left_window_size},
    {"right_window_size", kOfAll, &PluginAttributes::right_window_size},
    {"softmax_precision", kOfAttention, &PluginAttributes::softmax_precision},
    {"empty_row", kOfAttention, &PluginAttributes::empty_row},
    {"qkv_layout", kOfAttention | kOfCache, &PluginAttributes::qkv_layout},
    {"rotary_interleaved", kOfCache, &PluginAttributes::rotary_interleaved},
    {"rotary_dim", kOfCache, &PluginAttributes::rotary_dim},
    {"fixed_split", kOfCache | kOfVarlen, &PluginAttributes::fixed_split},
    {"max_q_length", kOfCache | kOfVarlen, &PluginAttributes::max_q_length},
    {"max_kv_length", kOfVarlen, &PluginAttributes::max_kv_length},
    {"inputs", kOfAll, &PluginAttributes::inputs},
    {"outputs", kOfAll, &PluginAttributes::outputs},
    {"planned_workspace", kOfAll, &PluginAttributes::planned_workspace},  // written by us alone
};

PluginField to_field(const char* name, const int64_t& value) {
  return {name, &value, PluginFieldType::kINT64, 1};
}
PluginField to_field(const char* name, const float& value) {
  return {name, &value, PluginFieldType::kFLOAT32, 1};
}
PluginField to_field(const char* name, const std::string& value) {
  return {name, value.c_str(), PluginFieldType::kCHAR, static_cast<int32_t>(value.size() + 1)};
}

template <typename T>
void add_field(const char* name, const T& value, std::vector<PluginField>* fields) {
  fields->push_back(to_field(name, value));
}
template <typename T>
void add_field(const char* name, const std::optional<T>& value, std::vector<PluginField>* fields) {
  if (value) fields->push_back(to_field(name, *value));
}

flashonnx_status wrong_type(const PluginField& field, const char* expected) {
  return make_status(
      FLASHONNX_INVALID_ARGUMENT,
      "FlashAttention: attribute '%s' is expected to be %s, got %d values of plugin field type %d",
      field.name, expected, field.length, static_cast<int>(field.type));
}

template <typename T>
T load(const void* data) {
  T value;
  std::memcpy(&value, data, sizeof value);  // TensorRT promises no alignment
  return value;
}

bool is_one(const PluginField& field, PluginFieldType type) {
  return field.type == type && field.length == 1 && field.data != nullptr;
}

// 32 bits from the ONNX parser, 64 from an engine.
flashonnx_status read_field(const PluginField& field, int64_t* value) {
  if (is_one(field, PluginFieldType::kINT32)) {
    *value = load<int32_t>(field.data);
  } else if (is_one(field, PluginFieldType::kINT64)) {
    *value = load<int64_t>(field.data);
  } else {
    return wrong_type(field, "an integer");
  }
  return ok();
}
flashonnx_status read_field(const PluginField& field, float* value) {
  if (!is_one(field, PluginFieldType::kFLOAT32)) return wrong_type(field, "a float");
  *value = load<float>(field.data);
  return ok();
}
template <typename T>
flashonnx_status read_field(const PluginField& field, std::optional<T>* value) {
  return read_field(field, &value->emplace());
}
// The parser counts the final zero, other callers may not.
flashonnx_status read_field(const PluginField& field, std::string* value) {
  if (field.type != PluginFieldType::kCHAR || field.length < 0 ||
      (field.length > 0 && field.data == nullptr)) {
    return wrong_type(field, "a string");
  }
  const auto* text = static_cast<const char*>(field.data);
  value->assign(text, field.length == 0 ? 0 : strnlen(text, field.length));
  return ok();
}

}  // namespace

std::vector<PluginField> field_names(const Operator& op) {
  std::vector<PluginField> names;
  for (const Field& field : kFields)
    if (field.is_of(op)) names.push_back({field.name, nullptr, PluginFieldType::kUNKNOWN, 0});
  names.pop_back();  // planned_workspace
  return names;
}

flashonnx_status read_fields(const nvinfer1::PluginFieldCollection& fields,
                             PluginAttributes* attributes) {
  for (int32_t i = 0; i < fields.nbFields; ++i) {
    const PluginField& given = fields.fields[i];
    for (const Field& field : kFields) {
      if (given.name == nullptr || std::string_view(given.name) != field.name) continue;
      FLASHONNX_RETURN_IF_ERROR(std::visit(
          [&](auto member) { return read_field(given, &(attributes->*member)); }, field.member));
    }
  }
  return ok();
}

std::vector<PluginField> serialize_fields(const Operator& op, const PluginAttributes& attributes) {
  std::vector<PluginField> fields;
  for (const Field& field : kFields) {
    if (!field.is_of(op)) continue;
    std::visit([&](auto member) { add_field(field.name, attributes.*member, &fields); },
               field.member);
  }
  return fields;
}

}  // namespace flashonnx::trt

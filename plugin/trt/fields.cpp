#include "trt/fields.h"

#include <cstring>
#include <string_view>
#include <variant>

#include "kernels/common/status.h"

namespace flashonnx::trt {
namespace {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

struct Field {
  const char* name;
  std::variant<int32_t Attributes::*, float Attributes::*, std::string Attributes::*,
               int64_t Attributes::*>
      member;
};

constexpr Field kFields[] = {
    {"is_causal", &Attributes::is_causal},
    {"q_num_heads", &Attributes::q_num_heads},
    {"kv_num_heads", &Attributes::kv_num_heads},
    {"scale", &Attributes::scale},
    {"softcap", &Attributes::softcap},
    {"left_window_size", &Attributes::left_window_size},
    {"right_window_size", &Attributes::right_window_size},
    {"softmax_precision", &Attributes::softmax_precision},
    {"empty_row", &Attributes::empty_row},
    {"qkv_layout", &Attributes::qkv_layout},
    {"inputs", &Attributes::inputs},
    {"outputs", &Attributes::outputs},
    {"planned_workspace", &Attributes::planned_workspace},  // last; written by us alone
};

PluginField to_field(const char* name, const int32_t& value) {
  return {name, &value, PluginFieldType::kINT32, 1};
}
PluginField to_field(const char* name, const int64_t& value) {
  return {name, &value, PluginFieldType::kINT64, 1};
}
PluginField to_field(const char* name, const float& value) {
  return {name, &value, PluginFieldType::kFLOAT32, 1};
}
PluginField to_field(const char* name, const std::string& value) {
  return {name, value.c_str(), PluginFieldType::kCHAR, static_cast<int32_t>(value.size() + 1)};
}

flashonnx_status wrong_type(const PluginField& field, const char* expected) {
  return make_status(
      FLASHONNX_INVALID_ARGUMENT,
      "FlashAttention: attribute '%s' is expected to be %s, got %d values of plugin field type %d",
      field.name, expected, field.length, static_cast<int>(field.type));
}

template <typename T>
flashonnx_status read_number(const PluginField& field, PluginFieldType type, const char* expected,
                             T* value) {
  if (field.type != type || field.length != 1 || field.data == nullptr)
    return wrong_type(field, expected);
  std::memcpy(value, field.data, sizeof *value);
  return ok();
}

flashonnx_status read_field(const PluginField& field, int32_t* value) {
  return read_number(field, PluginFieldType::kINT32, "an integer", value);
}
flashonnx_status read_field(const PluginField& field, int64_t* value) {
  return read_number(field, PluginFieldType::kINT64, "a 64-bit integer", value);
}
flashonnx_status read_field(const PluginField& field, float* value) {
  return read_number(field, PluginFieldType::kFLOAT32, "a float", value);
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

const nvinfer1::PluginFieldCollection& field_names() {
  static const std::vector<PluginField> kNames = [] {
    const Attributes defaults;
    std::vector<PluginField> names = serialize_fields(defaults);
    names.pop_back();  // planned_workspace
    for (PluginField& field : names) field = {field.name, nullptr, field.type, 1};
    return names;
  }();
  static const nvinfer1::PluginFieldCollection kCollection{static_cast<int32_t>(kNames.size()),
                                                           kNames.data()};
  return kCollection;
}

flashonnx_status read_fields(const nvinfer1::PluginFieldCollection& fields,
                             Attributes* attributes) {
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

std::vector<PluginField> serialize_fields(const Attributes& attributes) {
  std::vector<PluginField> fields;
  for (const Field& field : kFields) {
    fields.push_back(std::visit(
        [&](auto member) { return to_field(field.name, attributes.*member); }, field.member));
  }
  return fields;
}

}  // namespace flashonnx::trt

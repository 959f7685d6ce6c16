#include "job.h"

#include <cstring>
#include <map>
#include <sstream>

#include "check.h"

namespace {

using nvinfer1::DataType;
using nvinfer1::PluginFieldType;

const std::map<std::string, DataType> kTypes = {
    {"float32", DataType::kFLOAT}, {"float16", DataType::kHALF}, {"bfloat16", DataType::kBF16},
    {"int8", DataType::kINT8},     {"int32", DataType::kINT32},  {"int64", DataType::kINT64},
    {"bool", DataType::kBOOL},     {"float8", DataType::kFP8}};

int64_t size_of(DataType type) {
  switch (type) {
    case DataType::kINT64:
      return 8;
    case DataType::kFLOAT:
    case DataType::kINT32:
      return 4;
    case DataType::kHALF:
    case DataType::kBF16:
      return 2;
    default:
      return 1;
  }
}

size_t size_of(PluginFieldType type) {
  switch (type) {
    case PluginFieldType::kINT64:
      return sizeof(int64_t);
    case PluginFieldType::kINT32:
    case PluginFieldType::kFLOAT32:
      return sizeof(int32_t);
    case PluginFieldType::kCHAR:
      return 1;
    default:
      throw std::runtime_error("a field of a type that the host does not know");
  }
}

Field read_field(std::istream& words) {
  std::string name, type, value;
  words >> name >> type >> value;
  if (type == "int") {
    const auto number = static_cast<int32_t>(std::stoll(value));  // as TensorRT's parser has it
    return {name.c_str(), PluginFieldType::kINT32, &number, 1};
  }
  if (type == "float") {
    const float number = std::strtof(value.c_str(), nullptr);
    return {name.c_str(), PluginFieldType::kFLOAT32, &number, 1};
  }
  check(type == "string" && value[0] == '=', "field " + name + ": " + type + " " + value);
  return {name.c_str(), PluginFieldType::kCHAR, value.c_str() + 1,
          static_cast<int32_t>(value.size())};  // the final zero counts
}

Tensor read_tensor(std::istream& words) {
  std::string type;
  words >> type;
  Tensor tensor{kTypes.at(type), {}};
  for (int64_t size; words >> size;) tensor.dims.d[tensor.dims.nbDims++] = size;
  return tensor;
}

}  // namespace

int64_t Tensor::bytes() const {
  int64_t count = size_of(type);
  for (int32_t i = 0; i < dims.nbDims; ++i) count *= dims.d[i];
  return count;
}

Field::Field(const char* field_name, PluginFieldType field_type, const void* value, int32_t count)
    : name(field_name), type(field_type), length(count), data(1 + size_of(type) * count) {
  std::memcpy(data.data() + 1, value, data.size() - 1);
}

std::string Field::text() const {
  std::ostringstream out;
  out << name;
  if (type == PluginFieldType::kCHAR) {
    check(length > 0 && data.back() == '\0', name + ": a string without its final zero");
    out << " string =" << data.data() + 1;
  } else if (type == PluginFieldType::kFLOAT32) {
    float value;
    std::memcpy(&value, data.data() + 1, sizeof value);
    out << " float " << std::hexfloat << value;
  } else {
    check(type == PluginFieldType::kINT64, name + ": an integer that is not kept in 64 bits");
    int64_t value;
    std::memcpy(&value, data.data() + 1, sizeof value);
    out << " int " << value;
  }
  return out.str();
}

void read_line(const std::string& line, Job* job) {
  std::istringstream words(line);
  std::string kind, word;
  words >> kind;
  if (kind == "operator") {
    words >> job->op;
  } else if (kind == "field") {
    job->fields.push_back(read_field(words));
  } else if (kind == "shapes") {
    words >> word;
    job->shapes.emplace_back().run = word == "run";
  } else if (kind == "input") {
    job->shapes.back().inputs.push_back(read_tensor(words));
  } else if (kind == "output") {
    job->shapes.back().outputs.push_back(read_tensor(words));
  } else {
    throw std::runtime_error("unknown line: " + line);
  }
}

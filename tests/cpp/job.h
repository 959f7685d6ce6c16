// What the host is told to do, in lines that tests/trt_host.py writes.
//
//   operator NAME                         FlashAttention, unless another one
//   field NAME int|float|string VALUE     as from an ONNX node; a string begins with "="
//   shapes run|profile                    a set of shapes: run on them too, or only plan for them
//   input DTYPE DIMS...                   in the node's order
//   output DTYPE DIMS...
#pragma once

#include <NvInferRuntime.h>

#include <cstdint>
#include <istream>
#include <string>
#include <vector>

struct Tensor {
  nvinfer1::DataType type;
  nvinfer1::Dims dims;

  int64_t bytes() const;
};

struct ShapeSet {
  bool run = false;
  std::vector<Tensor> inputs;
  std::vector<Tensor> outputs;
};

// A plugin field that owns its data. It begins at an odd address: TensorRT promises no alignment.
struct Field {
  std::string name;
  nvinfer1::PluginFieldType type = nvinfer1::PluginFieldType::kUNKNOWN;
  int32_t length = 0;
  std::vector<char> data;  // one byte, then the value

  Field() = default;
  Field(const char* field_name, nvinfer1::PluginFieldType field_type, const void* value,
        int32_t count);
  nvinfer1::PluginField view() const { return {name.c_str(), data.data() + 1, type, length}; }
  std::string text() const;
  bool operator==(const Field&) const = default;
};

struct Job {
  std::string op = "FlashAttention";
  std::vector<Field> fields;
  std::vector<ShapeSet> shapes;
};

void read_line(const std::string& line, Job* job);

// Attributes as TensorRT's plugin fields: what a creator names, what the ONNX parser gives it, what
// an engine remembers.
#pragma once

#include <NvInferRuntime.h>

#include <vector>

#include "trt/node.h"

namespace flashonnx::trt {

// The fields an ONNX node of the operator may have; the parser passes on no others.
std::vector<nvinfer1::PluginField> field_names(const Operator& op);

// Reads both what comes from an ONNX node and what serialize_fields wrote. Absent fields keep their
// default.
flashonnx_status read_fields(const nvinfer1::PluginFieldCollection& fields,
                             PluginAttributes* attributes);

// Points into `attributes`.
std::vector<nvinfer1::PluginField> serialize_fields(const Operator& op,
                                                    const PluginAttributes& attributes);

}  // namespace flashonnx::trt

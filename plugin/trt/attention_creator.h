// Makes plugins from ONNX attributes and from serialised engines.
#pragma once

#include <NvInferRuntime.h>

#include <array>

namespace flashonnx::trt {

// One of each operator, never destroyed: a runtime may hold them until the process ends.
const std::array<nvinfer1::IPluginCreatorV3One*, 3>& creators();

}  // namespace flashonnx::trt

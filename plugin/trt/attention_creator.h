// Makes FlashAttention plugins from ONNX attributes and from serialised engines.
#pragma once

#include <NvInferRuntime.h>

namespace flashonnx::trt {

// The one creator, never destroyed: a runtime may hold it until the process ends.
nvinfer1::IPluginCreatorV3One& attention_creator();

}  // namespace flashonnx::trt

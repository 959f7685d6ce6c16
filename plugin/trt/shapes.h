// Output shapes as expressions of the input shapes.
#pragma once

#include <NvInferRuntime.h>

#include "trt/node.h"

namespace flashonnx::trt {

// `inputs` and `outputs` in the node's order. Only ranks are checked: sizes are not known yet.
flashonnx_status output_shapes(const Node& node, const nvinfer1::DimsExprs* inputs,
                               nvinfer1::IExprBuilder& builder, nvinfer1::DimsExprs* outputs);

}  // namespace flashonnx::trt

// What the adapter asks of the TensorRT libraries in the process. Nothing is linked; TensorRT 10,
// TensorRT 11 and TensorRT-RTX lay out their registry and logger differently, so those are called
// by slot, once the runtime has told its version.
#pragma once

#include <NvInferRuntime.h>

#include "flashonnx/status.h"

namespace flashonnx::trt {

// An ILoggerFinder of whatever version.
void set_logger_finder(void* finder);

// An error to the runtime's logger; silence where there is none. Never throws.
void log_error(const char* message) noexcept;

// The latest of them since the last call, from whatever thread; empty if there was none.
flashonnx_status take_last_error() noexcept;

// Registers `creator` with every TensorRT runtime of the process that does not know it yet.
flashonnx_status register_creator(nvinfer1::IPluginCreatorV3One& creator);

}  // namespace flashonnx::trt

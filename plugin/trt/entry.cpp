// What TensorRT looks up in a plugin library, and registration for hosts that only open one.
// Loading the library registers nothing: TensorRT's own loadLibrary fails, or crashes, on a library
// that has registered itself.
#include <NvInferRuntime.h>

#include "flashonnx/tensorrt.h"
#include "trt/attention_creator.h"
#include "trt/runtime.h"

extern "C" {

FLASHONNX_API nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) {
  static nvinfer1::IPluginCreatorInterface* const kCreators[] = {
      &flashonnx::trt::attention_creator()};
  count = 1;
  return kCreators;
}

FLASHONNX_API void setLoggerFinder(nvinfer1::ILoggerFinder* finder) {
  flashonnx::trt::set_logger_finder(finder);
}

FLASHONNX_API flashonnx_status flashonnx_tensorrt_register() {
  return flashonnx::trt::register_creator(flashonnx::trt::attention_creator());
}

FLASHONNX_API flashonnx_status flashonnx_tensorrt_last_error() {
  return flashonnx::trt::take_last_error();
}

}  // extern "C"

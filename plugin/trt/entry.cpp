// What TensorRT looks up in a plugin library, and registration for hosts that only open one.
// Loading the library registers nothing: TensorRT's own loadLibrary fails, or crashes, on a library
// that has registered itself.
#include <NvInferRuntime.h>

#include <vector>

#include "flashonnx/tensorrt.h"
#include "kernels/common/status.h"
#include "trt/attention_creator.h"
#include "trt/runtime.h"

extern "C" {

FLASHONNX_API nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) {
  static const std::vector<nvinfer1::IPluginCreatorInterface*> kCreators(
      flashonnx::trt::creators().begin(), flashonnx::trt::creators().end());
  count = static_cast<int32_t>(kCreators.size());
  return kCreators.data();
}

FLASHONNX_API void setLoggerFinder(nvinfer1::ILoggerFinder* finder) {
  flashonnx::trt::set_logger_finder(finder);
}

FLASHONNX_API flashonnx_status flashonnx_tensorrt_register() {
  for (nvinfer1::IPluginCreatorV3One* creator : flashonnx::trt::creators())
    FLASHONNX_RETURN_IF_ERROR(flashonnx::trt::register_creator(*creator));
  return flashonnx::ok();
}

FLASHONNX_API flashonnx_status flashonnx_tensorrt_last_error() {
  return flashonnx::trt::take_last_error();
}

}  // extern "C"

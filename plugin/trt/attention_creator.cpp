#include "trt/attention_creator.h"

#include <exception>

#include "kernels/common/status.h"
#include "trt/attention_plugin.h"
#include "trt/fields.h"
#include "trt/runtime.h"

namespace flashonnx::trt {
namespace {

flashonnx_status make_plugin(const nvinfer1::PluginFieldCollection& fields,
                             AttentionPlugin** plugin) {
  PluginAttributes attributes;
  Node node;
  FLASHONNX_RETURN_IF_ERROR(read_fields(fields, &attributes));
  FLASHONNX_RETURN_IF_ERROR(make_node(attributes, &node));
  *plugin = new AttentionPlugin(node);
  return ok();
}

class AttentionCreator final : public nvinfer1::IPluginCreatorV3One {
 public:
  // Both phases alike: an engine remembers the attributes themselves.
  nvinfer1::IPluginV3* createPlugin(const char*, const nvinfer1::PluginFieldCollection* fields,
                                    nvinfer1::TensorRTPhase) noexcept override {
    AttentionPlugin* plugin = nullptr;
    try {
      const nvinfer1::PluginFieldCollection none{};
      const flashonnx_status status = make_plugin(fields == nullptr ? none : *fields, &plugin);
      if (status.code != FLASHONNX_OK) log_error(status.message);
    } catch (const std::exception& error) {
      log_error(error.what());
    }
    return plugin;
  }
  const nvinfer1::PluginFieldCollection* getFieldNames() noexcept override {
    return &field_names();
  }
  const char* getPluginName() const noexcept override { return kPluginName; }
  const char* getPluginVersion() const noexcept override { return kPluginVersion; }
  const char* getPluginNamespace() const noexcept override { return kPluginNamespace; }
};

}  // namespace

nvinfer1::IPluginCreatorV3One& attention_creator() {
  static auto* const kCreator = new AttentionCreator;
  return *kCreator;
}

}  // namespace flashonnx::trt

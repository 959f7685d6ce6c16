#include "trt/attention_creator.h"

#include <exception>
#include <vector>

#include "kernels/common/status.h"
#include "trt/attention_plugin.h"
#include "trt/fields.h"
#include "trt/runtime.h"

namespace flashonnx::trt {
namespace {

flashonnx_status make_plugin(const Operator& op, const nvinfer1::PluginFieldCollection& fields,
                             AttentionPlugin** plugin) {
  PluginAttributes attributes;
  attributes.is_causal = op.is_causal;
  Node node;
  FLASHONNX_RETURN_IF_ERROR(read_fields(fields, &attributes));
  FLASHONNX_RETURN_IF_ERROR(make_node(op, attributes, &node));
  *plugin = new AttentionPlugin(node);
  return ok();
}

class AttentionCreator final : public nvinfer1::IPluginCreatorV3One {
 public:
  explicit AttentionCreator(const Operator& op) : op_(op), names_(field_names(op)) {
    collection_ = {static_cast<int32_t>(names_.size()), names_.data()};
  }

  // Both phases alike: an engine remembers the attributes themselves.
  nvinfer1::IPluginV3* createPlugin(const char*, const nvinfer1::PluginFieldCollection* fields,
                                    nvinfer1::TensorRTPhase) noexcept override {
    AttentionPlugin* plugin = nullptr;
    try {
      const nvinfer1::PluginFieldCollection none{};
      const flashonnx_status status = make_plugin(op_, fields == nullptr ? none : *fields, &plugin);
      if (status.code != FLASHONNX_OK) log_error(status.message);
    } catch (const std::exception& error) {
      log_error(error.what());
    }
    return plugin;
  }
  const nvinfer1::PluginFieldCollection* getFieldNames() noexcept override { return &collection_; }
  const char* getPluginName() const noexcept override { return op_.name; }
  const char* getPluginVersion() const noexcept override { return kPluginVersion; }
  const char* getPluginNamespace() const noexcept override { return kPluginNamespace; }

 private:
  const Operator& op_;
  std::vector<nvinfer1::PluginField> names_;
  nvinfer1::PluginFieldCollection collection_{};
};

}  // namespace

const std::array<nvinfer1::IPluginCreatorV3One*, 3>& creators() {
  static const auto& kCreators = *new std::array<nvinfer1::IPluginCreatorV3One*, 3>{
      new AttentionCreator(kAttention), new AttentionCreator(kCache),
      new AttentionCreator(kVarlen)};
  return kCreators;
}

}  // namespace flashonnx::trt

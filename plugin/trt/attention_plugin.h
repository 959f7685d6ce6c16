// The operators as TensorRT plugins.
#pragma once

#include <NvInferRuntime.h>

#include <cstddef>
#include <optional>
#include <vector>

#include "trt/node.h"

namespace flashonnx::trt {

inline constexpr const char* kPluginVersion = "1";
inline constexpr const char* kPluginNamespace = "flashonnx";

// Methods return 0 (or true) for success; reasons go to TensorRT's log. Clones share nothing.
class AttentionPlugin final : public nvinfer1::IPluginV3,
                              public nvinfer1::IPluginV3OneCore,
                              public nvinfer1::IPluginV3OneBuildV2,
                              public nvinfer1::IPluginV3OneRuntime {
 public:
  explicit AttentionPlugin(const Node& node) : node_(node) {}

  nvinfer1::IPluginCapability* getCapabilityInterface(
      nvinfer1::PluginCapabilityType type) noexcept override;
  nvinfer1::IPluginV3* clone() noexcept override;

  const char* getPluginName() const noexcept override { return node_.op->name; }
  const char* getPluginVersion() const noexcept override { return kPluginVersion; }
  const char* getPluginNamespace() const noexcept override { return kPluginNamespace; }

  int32_t getNbOutputs() const noexcept override { return node_.output_count; }
  int32_t getOutputDataTypes(nvinfer1::DataType* output_types, int32_t output_count,
                             const nvinfer1::DataType* input_types,
                             int32_t input_count) const noexcept override;
  int32_t getOutputShapes(const nvinfer1::DimsExprs* inputs, int32_t input_count,
                          const nvinfer1::DimsExprs* shape_inputs, int32_t shape_input_count,
                          nvinfer1::DimsExprs* outputs, int32_t output_count,
                          nvinfer1::IExprBuilder& builder) noexcept override;
  bool supportsFormatCombination(int32_t position, const nvinfer1::DynamicPluginTensorDesc* tensors,
                                 int32_t input_count, int32_t output_count) noexcept override;
  int32_t configurePlugin(const nvinfer1::DynamicPluginTensorDesc* inputs, int32_t input_count,
                          const nvinfer1::DynamicPluginTensorDesc* outputs,
                          int32_t output_count) noexcept override;
  size_t getWorkspaceSize(const nvinfer1::DynamicPluginTensorDesc* inputs, int32_t input_count,
                          const nvinfer1::DynamicPluginTensorDesc* outputs,
                          int32_t output_count) const noexcept override;
  int32_t getAliasedInput(int32_t) noexcept override { return -1; }

  nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext* context) noexcept override;
  int32_t onShapeChange(const nvinfer1::PluginTensorDesc* inputs, int32_t input_count,
                        const nvinfer1::PluginTensorDesc* outputs,
                        int32_t output_count) noexcept override;
  int32_t enqueue(const nvinfer1::PluginTensorDesc* input_descs,
                  const nvinfer1::PluginTensorDesc* output_descs, const void* const* inputs,
                  void* const* outputs, void* workspace, cudaStream_t stream) noexcept override;
  const nvinfer1::PluginFieldCollection* getFieldsToSerialize() noexcept override;

 private:
  flashonnx_status find_device();
  flashonnx_status workspace_at_maxima(const nvinfer1::DynamicPluginTensorDesc* inputs,
                                       const nvinfer1::DynamicPluginTensorDesc* outputs,
                                       int64_t* bytes) const;
  flashonnx_status params_of(const nvinfer1::PluginTensorDesc* input_descs,
                             const nvinfer1::PluginTensorDesc* output_descs,
                             const void* const* inputs, void* const* outputs,
                             flashonnx_attention_params* params);
  flashonnx_status check_shapes(const nvinfer1::PluginTensorDesc* inputs,
                                const nvinfer1::PluginTensorDesc* outputs);

  Node node_;
  std::optional<flashonnx_device> device_;  // where the context runs, known once it does
  std::vector<nvinfer1::PluginField>
      fields_;  // what getFieldsToSerialize returned last; points into node_
  nvinfer1::PluginFieldCollection collection_{};
};

}  // namespace flashonnx::trt

#include "trt/attention_plugin.h"

#include <algorithm>
#include <exception>
#include <memory>

#include "kernels/common/status.h"
#include "trt/fields.h"
#include "trt/runtime.h"
#include "trt/shapes.h"

namespace flashonnx::trt {
namespace {

using nvinfer1::DataType;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginTensorDesc;

int32_t to_dtype(DataType type) {
  switch (type) {
    case DataType::kFLOAT:
      return FLASHONNX_FLOAT32;
    case DataType::kHALF:
      return FLASHONNX_FLOAT16;
    case DataType::kBF16:
      return FLASHONNX_BFLOAT16;
    case DataType::kINT8:
      return FLASHONNX_INT8;
    case DataType::kINT32:
      return FLASHONNX_INT32;
    case DataType::kINT64:
      return FLASHONNX_INT64;
    default:
      return FLASHONNX_NONE;
  }
}

bool is_float(DataType type) {
  return type == DataType::kFLOAT || type == DataType::kHALF || type == DataType::kBF16;
}

// May a tensor have `type` beside queries of type `q`?
bool accepts(Type expected, DataType type, DataType q) {
  switch (expected) {
    case Type::kQ:
      return is_float(type);
    case Type::kMask:
      return type == q || type == DataType::kFLOAT || type == DataType::kINT8 ||
             type == DataType::kINT32;
    case Type::kInteger:
      return type == DataType::kINT32 || type == DataType::kINT64;
    case Type::kInt32:
      return type == DataType::kINT32;
    case Type::kInt64:
      return type == DataType::kINT64;
    case Type::kTable:
      return type == q || type == DataType::kFLOAT;
    case Type::kFloat:
      return type == DataType::kFLOAT;
    default:
      return type == q;
  }
}

const char* accepted(Type type) {
  switch (type) {
    case Type::kQ:
      return "float32, float16 or bfloat16";
    case Type::kMask:
      return "Q's type, float32, int8 or int32 (prepare_for_tensorrt casts booleans)";
    case Type::kInteger:
      return "int32 or int64";
    case Type::kInt32:
      return "int32";
    case Type::kInt64:
      return "int64";
    case Type::kTable:
      return "Q's type or float32";
    case Type::kFloat:
      return "float32";
    default:
      return "Q's type";
  }
}

DataType output_type(const Port& output, DataType q) {
  return output.type == Type::kFloat ? DataType::kFLOAT : q;
}

Tensor tensor_of(const PluginTensorDesc& desc, const nvinfer1::Dims& dims, void* data) {
  Tensor tensor{{true, static_cast<size_t>(dims.nbDims), {}}, to_dtype(desc.type), data};
  std::copy_n(dims.d, std::min(tensor.shape.rank, kMaxRank), tensor.shape.dims.begin());
  return tensor;
}

flashonnx_status check_counts(const Node& node, int32_t input_count, int32_t output_count) {
  if (input_count == node.input_count && output_count == node.output_count) return ok();
  return make_status(FLASHONNX_INVALID_ARGUMENT,
                     "FlashAttention: %d inputs and %d outputs are expected by the attributes "
                     "'inputs' (\"%s\") and 'outputs' "
                     "(\"%s\"), got %d and %d; flashonnx.tensorrt.prepare_for_tensorrt writes them",
                     node.input_count, node.output_count, node.given.inputs.c_str(),
                     node.given.outputs.c_str(), input_count, output_count);
}

// The devices an engine may be planned for. TensorRT does not tell a plugin its target, which need
// not be the building machine's GPU (there may be none): a plan holds the workspace of the
// hungriest. Multiprocessors are the largest product's.
constexpr flashonnx_device kTargets[] = {
    {FLASHONNX_CUDA, 0, 80, 108, 166912},  {FLASHONNX_CUDA, 0, 86, 84, 101376},
    {FLASHONNX_CUDA, 0, 89, 142, 101376},  {FLASHONNX_CUDA, 0, 90, 132, 232448},
    {FLASHONNX_CUDA, 0, 100, 148, 232448}, {FLASHONNX_CUDA, 0, 120, 188, 101376},
};

// 0 for success, as TensorRT wants it; any other outcome is logged.
int32_t report(const flashonnx_status& status) {
  if (status.code == FLASHONNX_OK) return 0;
  log_error(status.message);
  return -1;
}

// No exception may cross into TensorRT: whatever `body` throws (only memory can run out) becomes
// `failure`.
template <typename Result, typename Body>
Result guarded(Result failure, Body body) noexcept {
  try {
    return body();
  } catch (const std::exception& error) {
    log_error(error.what());
  } catch (...) {
    log_error("FlashAttention: unknown exception");
  }
  return failure;
}

}  // namespace

nvinfer1::IPluginCapability* AttentionPlugin::getCapabilityInterface(
    nvinfer1::PluginCapabilityType type) noexcept {
  switch (type) {
    case nvinfer1::PluginCapabilityType::kCORE:
      return static_cast<nvinfer1::IPluginV3OneCore*>(this);
    case nvinfer1::PluginCapabilityType::kBUILD:
      return static_cast<nvinfer1::IPluginV3OneBuildV2*>(this);
    case nvinfer1::PluginCapabilityType::kRUNTIME:
      return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
  }
  return nullptr;
}

nvinfer1::IPluginV3* AttentionPlugin::clone() noexcept {
  return guarded<nvinfer1::IPluginV3*>(nullptr, [&] {
    auto* copy = new AttentionPlugin(node_);
    copy->device_ = device_;
    return copy;
  });
}

int32_t AttentionPlugin::getOutputDataTypes(DataType* output_types, int32_t output_count,
                                            const DataType* input_types,
                                            int32_t input_count) const noexcept {
  return guarded(-1, [&] {
    if (report(check_counts(node_, input_count, output_count)) != 0) return -1;
    const DataType q = input_types[0];
    for (int32_t i = 0; i < input_count; ++i) {
      const Port& input = node_.op->inputs[node_.inputs[i]];
      if (accepts(input.type, input_types[i], q)) continue;
      return report(make_status(
          FLASHONNX_NOT_IMPLEMENTED,
          "FlashAttention: input '%s' is expected to have type %s, got TensorRT's DataType %d",
          input.name, accepted(input.type), static_cast<int>(input_types[i])));
    }
    for (int32_t i = 0; i < output_count; ++i)
      output_types[i] = output_type(node_.op->outputs[node_.outputs[i]], q);
    return 0;
  });
}

int32_t AttentionPlugin::getOutputShapes(const nvinfer1::DimsExprs* inputs, int32_t input_count,
                                         const nvinfer1::DimsExprs*, int32_t,
                                         nvinfer1::DimsExprs* outputs, int32_t output_count,
                                         nvinfer1::IExprBuilder& builder) noexcept {
  return guarded(-1, [&] {
    if (report(check_counts(node_, input_count, output_count)) != 0) return -1;
    return report(output_shapes(node_, inputs, builder, outputs));
  });
}

bool AttentionPlugin::supportsFormatCombination(int32_t position,
                                                const DynamicPluginTensorDesc* tensors,
                                                int32_t input_count, int32_t) noexcept {
  const PluginTensorDesc& desc = tensors[position].desc;
  if (desc.format != nvinfer1::TensorFormat::kLINEAR) return false;
  const DataType q = tensors[0].desc.type;
  if (position < input_count)
    return accepts(node_.op->inputs[node_.inputs[position]].type, desc.type, q);
  return desc.type == output_type(node_.op->outputs[node_.outputs[position - input_count]], q);
}

int32_t AttentionPlugin::configurePlugin(const DynamicPluginTensorDesc* inputs, int32_t input_count,
                                         const DynamicPluginTensorDesc* outputs,
                                         int32_t output_count) noexcept {
  return guarded(-1, [&] {
    if (report(check_counts(node_, input_count, output_count)) != 0) return -1;
    int64_t bytes = 0;
    if (report(workspace_at_maxima(inputs, outputs, &bytes)) != 0) return -1;
    int64_t& planned =
        node_.given.planned_workspace;  // called once for each profile: the largest counts
    planned = std::max(planned, bytes);
    return 0;
  });
}

size_t AttentionPlugin::getWorkspaceSize(const DynamicPluginTensorDesc* inputs, int32_t input_count,
                                         const DynamicPluginTensorDesc* outputs,
                                         int32_t output_count) const noexcept {
  return guarded<size_t>(0, [&]() -> size_t {
    int64_t bytes = 0;
    if (report(check_counts(node_, input_count, output_count)) != 0) return 0;
    return report(workspace_at_maxima(inputs, outputs, &bytes)) == 0 ? static_cast<size_t>(bytes)
                                                                     : 0;
  });
}

nvinfer1::IPluginV3* AttentionPlugin::attachToContext(nvinfer1::IPluginResourceContext*) noexcept {
  return guarded<nvinfer1::IPluginV3*>(nullptr, [&]() -> nvinfer1::IPluginV3* {
    auto copy = std::make_unique<AttentionPlugin>(node_);
    if (report(copy->find_device()) != 0) return nullptr;
    return copy.release();
  });
}

int32_t AttentionPlugin::onShapeChange(const PluginTensorDesc* inputs, int32_t input_count,
                                       const PluginTensorDesc* outputs,
                                       int32_t output_count) noexcept {
  return guarded(-1, [&] {
    if (report(check_counts(node_, input_count, output_count)) != 0) return -1;
    return report(check_shapes(inputs, outputs));
  });
}

int32_t AttentionPlugin::enqueue(const PluginTensorDesc* input_descs,
                                 const PluginTensorDesc* output_descs, const void* const* inputs,
                                 void* const* outputs, void* workspace,
                                 cudaStream_t stream) noexcept {
  return guarded(-1, [&] {
    flashonnx_attention_params params;
    if (report(params_of(input_descs, output_descs, inputs, outputs, &params)) != 0) return -1;
    return report(flashonnx_attention_run(&params, workspace, stream));
  });
}

const nvinfer1::PluginFieldCollection* AttentionPlugin::getFieldsToSerialize() noexcept {
  return guarded<const nvinfer1::PluginFieldCollection*>(nullptr, [&] {
    fields_ = serialize_fields(*node_.op, node_.given);
    collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
    return &collection_;
  });
}

flashonnx_status AttentionPlugin::find_device() {
  flashonnx_device device;
  FLASHONNX_RETURN_IF_ERROR(flashonnx_device_query(FLASHONNX_CUDA, -1, &device));
  device_ = device;
  return ok();
}

flashonnx_status AttentionPlugin::workspace_at_maxima(const DynamicPluginTensorDesc* inputs,
                                                      const DynamicPluginTensorDesc* outputs,
                                                      int64_t* bytes) const {
  InputTensors in;
  OutputTensors out;
  for (int32_t i = 0; i < node_.input_count; ++i)
    in[node_.inputs[i]] = tensor_of(inputs[i].desc, inputs[i].max, nullptr);
  for (int32_t i = 0; i < node_.output_count; ++i)
    out[node_.outputs[i]] = tensor_of(outputs[i].desc, outputs[i].max, nullptr);
  flashonnx_attention_params params;
  FLASHONNX_RETURN_IF_ERROR(node_.op->fill_params(node_, in, out, Sizes::kMaxima, &params));
  *bytes = -1;
  flashonnx_status refusal{};
  for (const flashonnx_device& target : kTargets) {
    params.device = target;
    int64_t needed = 0;
    const flashonnx_status status = flashonnx_attention_workspace_bound(&params, &needed);
    if (status.code == FLASHONNX_OK) *bytes = std::max(*bytes, needed);
    if (status.code != FLASHONNX_OK && refusal.code == FLASHONNX_OK) refusal = status;
  }
  return *bytes < 0 ? refusal : ok();
}

flashonnx_status AttentionPlugin::params_of(const PluginTensorDesc* input_descs,
                                            const PluginTensorDesc* output_descs,
                                            const void* const* inputs, void* const* outputs,
                                            flashonnx_attention_params* params) {
  InputTensors in;
  OutputTensors out;
  for (int32_t i = 0; i < node_.input_count; ++i) {
    void* data = inputs == nullptr ? nullptr : const_cast<void*>(inputs[i]);
    in[node_.inputs[i]] = tensor_of(input_descs[i], input_descs[i].dims, data);
  }
  for (int32_t i = 0; i < node_.output_count; ++i) {
    out[node_.outputs[i]] =
        tensor_of(output_descs[i], output_descs[i].dims, outputs == nullptr ? nullptr : outputs[i]);
  }
  FLASHONNX_RETURN_IF_ERROR(node_.op->fill_params(node_, in, out, Sizes::kExact, params));
  if (!device_) FLASHONNX_RETURN_IF_ERROR(find_device());
  params->device = *device_;
  return ok();
}

flashonnx_status AttentionPlugin::check_shapes(const PluginTensorDesc* inputs,
                                               const PluginTensorDesc* outputs) {
  flashonnx_attention_params params;
  FLASHONNX_RETURN_IF_ERROR(params_of(inputs, outputs, nullptr, nullptr, &params));
  int64_t needed = 0;
  FLASHONNX_RETURN_IF_ERROR(flashonnx_attention_workspace(&params, &needed));
  const int64_t planned = node_.given.planned_workspace;
  if (planned < 0 || needed <= planned) return ok();
  return make_status(FLASHONNX_RUNTIME_ERROR,
                     "FlashAttention: this device needs a workspace of %lld bytes, the engine was "
                     "planned with %lld; build it "
                     "on or for this device",
                     static_cast<long long>(needed), static_cast<long long>(planned));
}

}  // namespace flashonnx::trt

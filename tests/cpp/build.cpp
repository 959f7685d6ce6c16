// The builder's part: what TensorRT-RTX 1.7 was seen to call, in that order.
#include <algorithm>

#include "expressions.h"
#include "plugin.h"

namespace {

using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::DimsExprs;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::TensorFormat;

std::vector<DataType> types_of(const std::vector<Tensor>& tensors) {
  std::vector<DataType> types;
  for (const Tensor& tensor : tensors) types.push_back(tensor.type);
  return types;
}

void check_types(const Plugin& plugin, const ShapeSet& shapes) {
  const std::vector<DataType> inputs = types_of(shapes.inputs);
  const std::vector<DataType> expected = types_of(shapes.outputs);
  BuildCapability& build = building(plugin);
  check(build.getNbOutputs() == static_cast<int32_t>(expected.size()), "number of outputs");
  std::vector<DataType> types(expected.size());
  check(build.getOutputDataTypes(types.data(), static_cast<int32_t>(types.size()), inputs.data(),
                                 static_cast<int32_t>(inputs.size())) == 0,
        "getOutputDataTypes failed");
  check(types == expected, "types of outputs");
}

// The expressions, asked for once, must come to the right shapes in every set.
void check_shapes(const Plugin& plugin, const Job& job) {
  const ShapeSet& first = job.shapes.front();
  ExpressionBuilder expressions;
  std::vector<DimsExprs> inputs(first.inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    inputs[i].nbDims = first.inputs[i].dims.nbDims;
    for (int32_t axis = 0; axis < inputs[i].nbDims; ++axis) {
      inputs[i].d[axis] = expressions.symbol(i, axis);
    }
  }
  std::vector<DimsExprs> outputs(first.outputs.size());
  check(building(plugin).getOutputShapes(inputs.data(), static_cast<int32_t>(inputs.size()),
                                         nullptr, 0, outputs.data(),
                                         static_cast<int32_t>(outputs.size()), expressions) == 0,
        "getOutputShapes failed");
  for (const ShapeSet& shapes : job.shapes) {
    if (!shapes.run) continue;
    Sizes sizes;
    for (const Tensor& input : shapes.inputs) sizes.push_back(input.dims);
    for (size_t i = 0; i < outputs.size(); ++i) {
      const Dims& expected = shapes.outputs[i].dims;
      check(outputs[i].nbDims == expected.nbDims, "rank of output " + std::to_string(i));
      for (int32_t axis = 0; axis < expected.nbDims; ++axis) {
        const int64_t size = ExpressionBuilder::evaluate(outputs[i].d[axis], sizes);
        check(size == expected.d[axis], "output " + std::to_string(i) + " has size " +
                                            std::to_string(size) + " in dimension " +
                                            std::to_string(axis));
      }
    }
  }
}

// Open sizes, and a profile whose minimum, optimum and maximum are these shapes.
std::vector<DynamicPluginTensorDesc> described(const std::vector<Tensor>& tensors) {
  std::vector<DynamicPluginTensorDesc> descs;
  for (const Tensor& tensor : tensors) {
    DynamicPluginTensorDesc desc{};
    desc.desc = {tensor.dims, tensor.type, TensorFormat::kLINEAR, 1.0F};
    desc.min = desc.max = desc.opt = tensor.dims;
    std::fill_n(desc.desc.dims.d, tensor.dims.nbDims, -1);
    descs.push_back(desc);
  }
  return descs;
}

// Linear, and of these types, and nothing else.
void check_formats(const Plugin& plugin, const ShapeSet& shapes) {
  std::vector<DynamicPluginTensorDesc> all = described(shapes.inputs);
  const auto inputs = static_cast<int32_t>(all.size());
  for (const auto& desc : described(shapes.outputs)) all.push_back(desc);
  const auto outputs = static_cast<int32_t>(all.size()) - inputs;
  BuildCapability& build = building(plugin);
  check(build.getFormatCombinationLimit() > 0, "no format combination is allowed");
  for (int32_t position = 0; position < inputs + outputs; ++position) {
    auto& desc = all[position].desc;
    const auto supported = [&] {
      return build.supportsFormatCombination(position, all.data(), inputs, outputs);
    };
    const std::string where = " of tensor " + std::to_string(position);
    check(supported(), "the type" + where + " is refused");
    for (TensorFormat format : {TensorFormat::kCHW2, TensorFormat::kHWC8, TensorFormat::kCHW4}) {
      desc.format = format;
      check(!supported(), "a format that is not linear" + where + " is taken");
    }
    desc.format = TensorFormat::kLINEAR;
    const DataType type = desc.type;
    for (DataType wrong : {DataType::kBOOL, DataType::kUINT8, DataType::kFP8, DataType::kINT4}) {
      desc.type = wrong;
      check(!supported(), "a wrong type" + where + " is taken");
    }
    desc.type = type;
  }
}

size_t configure(const Plugin& plugin, const ShapeSet& shapes) {
  const auto inputs = described(shapes.inputs);
  const auto outputs = described(shapes.outputs);
  const auto input_count = static_cast<int32_t>(inputs.size());
  const auto output_count = static_cast<int32_t>(outputs.size());
  check(building(plugin).configurePlugin(inputs.data(), input_count, outputs.data(),
                                         output_count) == 0,
        "configurePlugin failed");
  return building(plugin).getWorkspaceSize(inputs.data(), input_count, outputs.data(),
                                           output_count);
}

}  // namespace

Plan build(Plugin plugin, const Job& job) {
  const ShapeSet& first = job.shapes.front();
  check_types(plugin, first);
  Plugin network = copy(plugin);  // addPluginV3 takes a copy, and the parser deletes its own
  plugin.reset();
  check_types(network, first);
  check_shapes(network, job);

  Plugin layer = copy(network);
  check_shapes(layer, job);
  check_shapes(layer, job);
  for (int32_t i = 0; i < building(layer).getNbOutputs(); ++i) {
    check(building(layer).getAliasedInput(i) == -1, "an output is an alias");
  }
  Plugin chosen = copy(layer);
  check_formats(chosen, first);
  Plan plan;
  for (const ShapeSet& shapes : job.shapes) {
    plan.workspaces.push_back(configure(chosen, shapes));
    plan.workspace = std::max(plan.workspace, plan.workspaces.back());
  }
  check(building(chosen).getNbTactics() == 0, "the plugin has tactics, which the host never sets");
  plan.fields = serialized(chosen);
  check(serialized(chosen) == plan.fields, "getFieldsToSerialize changes its mind");
  check(serialized(copy(chosen)) == plan.fields, "a clone serialises to something else");
  return plan;
}

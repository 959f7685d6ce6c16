#include "trt/node.h"

#include <algorithm>
#include <span>
#include <string_view>

#include "kernels/common/status.h"

namespace flashonnx::trt {
namespace {

flashonnx_status invalid(const char* name, const char* expected, const std::string& got) {
  return make_status(FLASHONNX_INVALID_ARGUMENT,
                     "FlashAttention: attribute '%s' is expected to be %s, got \"%.120s\"", name,
                     expected, got.c_str());
}

// The positions of the comma-separated names of `list` among `known`, in the order of the list.
flashonnx_status parse_names(const char* attribute, const std::string& list,
                             std::span<const char* const> known, int32_t* positions,
                             int32_t* count) {
  *count = 0;
  for (size_t begin = 0; begin <= list.size();) {
    const size_t end = std::min(list.find(',', begin), list.size());
    const std::string_view name = std::string_view(list).substr(begin, end - begin);
    const auto found = std::find(known.begin(), known.end(), name);
    const auto position = static_cast<int32_t>(found - known.begin());
    if (found == known.end() ||
        std::find(positions, positions + *count, position) != positions + *count) {
      return invalid(attribute, "distinct names of the operator's tensors, separated by commas",
                     list);
    }
    positions[(*count)++] = position;
    begin = end + 1;
  }
  return ok();
}

flashonnx_status check_presence(const Node& node) {
  const std::string& list = node.given.inputs;
  if (node.inputs[0] != kQ) return invalid("inputs", "names that begin with \"Q\"", list);
  if (node.outputs[0] != kY)
    return invalid("outputs", "names that begin with \"Y\"", node.given.outputs);
  const bool separate = node.attributes.layout == Layout::kSeparate;
  if (node.has_input(kK) != separate || node.has_input(kV) != separate) {
    return invalid(
        "inputs",
        separate ? "names that contain \"K\" and \"V\"" : "without \"K\" and \"V\": Q packs them",
        list);
  }
  if (node.has_input(kPastKey) != node.has_input(kPastValue)) {
    return invalid("inputs", "\"past_key\" and \"past_value\" together", list);
  }
  return ok();
}

// Type and data, `offset` elements after the tensor's beginning (a packed projection; only Q's
// types have one).
void bind(const Tensor& from, int64_t offset, flashonnx_tensor* to) {
  const int64_t element_size = from.dtype == FLASHONNX_FLOAT32 ? 4 : 2;
  to->dtype = from.dtype;
  to->data = from.data == nullptr ? nullptr : static_cast<char*>(from.data) + offset * element_size;
}

}  // namespace

bool Node::has_input(Input input) const {
  return std::find(inputs.begin(), inputs.begin() + input_count, input) !=
         inputs.begin() + input_count;
}

flashonnx_status make_node(const PluginAttributes& attributes, Node* node) {
  *node = {};
  node->given = attributes;
  FLASHONNX_RETURN_IF_ERROR(interpret(attributes, &node->attributes));
  const char* usual = node->attributes.layout == Layout::kSeparate ? "Q,K,V" : "Q";
  FLASHONNX_RETURN_IF_ERROR(parse_names("inputs",
                                        attributes.inputs.empty() ? usual : attributes.inputs,
                                        kInputNames, node->inputs.data(), &node->input_count));
  FLASHONNX_RETURN_IF_ERROR(parse_names("outputs", attributes.outputs, kOutputNames,
                                        node->outputs.data(), &node->output_count));
  return check_presence(*node);
}

flashonnx_status fill_params(const Node& node, const InputTensors& in, const OutputTensors& out,
                             Sizes sizes, flashonnx_attention_params* params) {
  flashonnx_attention_init(params);
  PackedOffsets packed;
  OutputShapes unused;
  const InputShapes shapes = {in[kQ].shape,       in[kK].shape,       in[kV].shape,
                              in[kMask].shape,    in[kPastKey].shape, in[kPastValue].shape,
                              in[kLengths].shape, in[kSinks].shape};
  FLASHONNX_RETURN_IF_ERROR(describe(node.attributes, shapes, sizes, params, &packed, &unused));
  const bool separate = node.attributes.layout == Layout::kSeparate;
  bind(in[kQ], 0, &params->q);
  bind(in[separate ? kK : kQ], packed.k, &params->k);
  bind(in[separate ? kV : kQ], packed.v, &params->v);
  bind(in[kMask], 0, &params->mask);
  bind(in[kPastKey], 0, &params->past_k);
  bind(in[kPastValue], 0, &params->past_v);
  bind(in[kLengths], 0, &params->key_lengths);
  bind(in[kSinks], 0, &params->sinks);
  bind(out[kY], 0, &params->o);
  bind(out[kPresentKey], 0, &params->present_k);
  bind(out[kPresentValue], 0, &params->present_v);
  bind(out[kLse], 0, &params->lse);
  return ok();
}

}  // namespace flashonnx::trt

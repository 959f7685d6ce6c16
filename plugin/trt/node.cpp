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
                             std::span<const Port> known, int32_t* positions, int32_t* count) {
  *count = 0;
  for (size_t begin = 0; begin <= list.size();) {
    const size_t end = std::min(list.find(',', begin), list.size());
    const std::string_view name = std::string_view(list).substr(begin, end - begin);
    const auto found = std::find_if(known.begin(), known.end(),
                                    [&](const Port& port) { return name == port.name; });
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

template <size_t kSize>
bool contains(const std::array<int32_t, kSize>& positions, int32_t count, int32_t position) {
  return std::find(positions.begin(), positions.begin() + count, position) !=
         positions.begin() + count;
}

}  // namespace

bool Node::has_input(int32_t input) const { return contains(inputs, input_count, input); }
bool Node::has_output(int32_t output) const { return contains(outputs, output_count, output); }

flashonnx_status make_node(const Operator& op, const PluginAttributes& attributes, Node* node) {
  *node = {};
  node->op = &op;
  node->given = attributes;
  FLASHONNX_RETURN_IF_ERROR(interpret(attributes, &node->attributes));
  const std::string list =
      attributes.inputs.empty() ? op.usual_inputs(node->attributes) : attributes.inputs;
  FLASHONNX_RETURN_IF_ERROR(
      parse_names("inputs", list, op.inputs, node->inputs.data(), &node->input_count));
  FLASHONNX_RETURN_IF_ERROR(parse_names("outputs", attributes.outputs, op.outputs,
                                        node->outputs.data(), &node->output_count));
  if (node->inputs[0] != 0) return invalid("inputs", "names that begin with \"Q\"", list);
  if (node->outputs[0] != 0)
    return invalid("outputs", "names that begin with \"Y\"", attributes.outputs);
  return op.check_presence(*node);
}

}  // namespace flashonnx::trt

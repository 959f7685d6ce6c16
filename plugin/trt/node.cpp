#include "trt/node.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <string_view>

#include "kernels/common/status.h"

namespace flashonnx::trt {
namespace {

flashonnx_status invalid_attribute(const char* name, const char* expected, const std::string& got) {
  return make_status(FLASHONNX_INVALID_ARGUMENT,
                     "FlashAttention: attribute '%s' is expected to be %s, got \"%s\"", name,
                     expected, got.c_str());
}

flashonnx_status check_values(const Attributes& a) {
  constexpr int32_t kFloat = 1, kFloat16 = 10, kBfloat16 = 16;  // of ONNX
  auto text = [](auto value) { return std::to_string(value); };
  if (a.is_causal != 0 && a.is_causal != 1)
    return invalid_attribute("is_causal", "0 or 1", text(a.is_causal));
  if (a.q_num_heads < 1 && a.q_num_heads != kNoHeads) {
    return invalid_attribute("q_num_heads", "at least 1", text(a.q_num_heads));
  }
  if (a.kv_num_heads < 1 && a.kv_num_heads != kNoHeads) {
    return invalid_attribute("kv_num_heads", "at least 1", text(a.kv_num_heads));
  }
  if (a.left_window_size < -1) {
    return invalid_attribute("left_window_size", "-1 (no bound) or at least 0",
                             text(a.left_window_size));
  }
  if (a.right_window_size < -1) {
    return invalid_attribute("right_window_size", "-1 (no bound) or at least 0",
                             text(a.right_window_size));
  }
  if (a.scale <= 0 || std::isinf(a.scale))
    return invalid_attribute("scale", "positive and finite", text(a.scale));
  if (!(a.softcap >= 0) || std::isinf(a.softcap)) {
    return invalid_attribute("softcap", "0 (none) or positive and finite", text(a.softcap));
  }
  if (a.empty_row != "zero" && a.empty_row != "mean") {
    return invalid_attribute("empty_row", "\"zero\" or \"mean\"", a.empty_row);
  }
  const int32_t precision = a.softmax_precision;
  if (precision == 0 || precision == kFloat || precision == kFloat16 || precision == kBfloat16)
    return ok();
  return make_status(FLASHONNX_NOT_IMPLEMENTED,
                     "FlashAttention: attribute 'softmax_precision' is expected to be 1 (float32), "
                     "10 (float16) or 16 "
                     "(bfloat16), got %d: softmax runs in float32",
                     precision);
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
      return invalid_attribute(
          attribute, "distinct names of the operator's tensors, separated by commas", list);
    }
    positions[(*count)++] = position;
    begin = end + 1;
  }
  return ok();
}

flashonnx_status parse_layout(const std::string& name, Layout* layout) {
  constexpr std::string_view kNames[] = {"separate", "3hd", "h3d", "gqa", "time_major"};
  const auto found = std::find(std::begin(kNames), std::end(kNames), name);
  if (found == std::end(kNames)) {
    return invalid_attribute("qkv_layout",
                             "\"separate\", \"3hd\", \"h3d\", \"gqa\" or \"time_major\"", name);
  }
  *layout = static_cast<Layout>(found - std::begin(kNames));
  return ok();
}

flashonnx_status check_presence(const Node& node) {
  const std::string& list = node.attributes.inputs;
  if (node.inputs[0] != kQ) return invalid_attribute("inputs", "names that begin with \"Q\"", list);
  if (node.outputs[0] != kY) {
    return invalid_attribute("outputs", "names that begin with \"Y\"", node.attributes.outputs);
  }
  const bool key_and_value = node.has_input(kK) && node.has_input(kV);
  const bool neither = !node.has_input(kK) && !node.has_input(kV);
  if (node.packed() ? !neither : !key_and_value) {
    return invalid_attribute("inputs",
                             node.packed()
                                 ? "without \"K\" and \"V\" (qkv_layout packs them into Q)"
                                 : "names that contain \"K\" and \"V\"",
                             list);
  }
  if (node.has_input(kPastKey) != node.has_input(kPastValue)) {
    return invalid_attribute("inputs", "\"past_key\" and \"past_value\" together", list);
  }
  return ok();
}

// A tensor as (batch, heads, length, dim) with strides in elements, starting `offset` elements
// after its data.
struct View {
  int64_t batch = 0, heads = 0, length = 0, dim = 0;
  int64_t batch_stride = 0, head_stride = 0, length_stride = 0;
  int64_t offset = 0;
};

View view_of_4d(const DenseTensor& t) {
  const auto& d = t.dims;
  return {d[0], d[1], d[2], d[3], d[1] * d[2] * d[3], d[2] * d[3], d[3]};
}

View view_of_3d(const DenseTensor& t, int64_t heads) {
  const auto& d = t.dims;
  return {d[0], heads, d[1], d[2] / heads, d[1] * d[2], d[2] / heads, d[2]};
}

int64_t size_of(int32_t dtype) { return dtype == FLASHONNX_FLOAT32 ? 4 : 2; }

flashonnx_tensor strided(const DenseTensor& t, const View& v) {
  void* data =
      t.data == nullptr ? nullptr : static_cast<char*>(t.data) + v.offset * size_of(t.dtype);
  return {data, {v.batch_stride, v.head_stride, v.length_stride, 1}, t.dtype, 0};
}

flashonnx_status view_of(const char* name, const DenseTensor& t, int64_t rank, int64_t heads,
                         View* view) {
  if (t.rank != rank) {
    return make_status(FLASHONNX_INVALID_ARGUMENT,
                       "FlashAttention: input '%s' is expected to have %lld dimensions, got %d",
                       name, static_cast<long long>(rank), t.rank);
  }
  if (rank == 4) {
    if (heads != kNoHeads && heads != t.dims[1]) {
      return make_status(FLASHONNX_INVALID_ARGUMENT,
                         "FlashAttention: input '%s' is expected to have %lld heads, got %lld",
                         name, static_cast<long long>(heads), static_cast<long long>(t.dims[1]));
    }
    *view = view_of_4d(t);
    return ok();
  }
  if (heads <= 0 || t.dims[2] % heads != 0) {
    return make_status(FLASHONNX_INVALID_ARGUMENT,
                       "FlashAttention: the last dimension of input '%s' is expected to be a "
                       "multiple of its number of "
                       "heads (q_num_heads, kv_num_heads: %lld), got %lld",
                       name, static_cast<long long>(heads), static_cast<long long>(t.dims[2]));
  }
  *view = view_of_3d(t, heads);
  return ok();
}

// Q, K and V inside one tensor: (B, S, width), or (S, B, width) for kTimeMajor, where width holds
// the heads of all three.
flashonnx_status view_packed(const Node& node, const DenseTensor& t, View* q, View* k, View* v) {
  const bool grouped = node.layout == Layout::k3hd || node.layout == Layout::kH3d;
  if (t.rank != 3 && !(grouped && t.rank == 5)) {
    return make_status(
        FLASHONNX_INVALID_ARGUMENT,
        "FlashAttention: input 'Q' with qkv_layout \"%s\" is expected to have %s, got %d",
        node.attributes.qkv_layout.c_str(), grouped ? "3 or 5 dimensions" : "3 dimensions", t.rank);
  }
  int64_t q_heads = node.attributes.q_num_heads;
  int64_t kv_heads =
      node.attributes.kv_num_heads != kNoHeads ? node.attributes.kv_num_heads : q_heads;
  int64_t width = t.dims[2];
  if (t.rank == 5) {
    const int64_t heads = t.dims[node.layout == Layout::k3hd ? 3 : 2];
    if ((q_heads != kNoHeads && q_heads != heads) || (kv_heads != kNoHeads && kv_heads != heads)) {
      return make_status(FLASHONNX_INVALID_ARGUMENT,
                         "FlashAttention: input 'Q' is expected to have %lld heads, got %lld",
                         static_cast<long long>(q_heads), static_cast<long long>(heads));
    }
    q_heads = kv_heads = heads;
    width = t.dims[2] * t.dims[3] * t.dims[4];
  }
  const int64_t heads = q_heads + 2 * kv_heads;
  const bool equal = node.layout == Layout::kGqa || q_heads == kv_heads;
  if (q_heads <= 0 || kv_heads <= 0 || !equal || width % heads != 0) {
    return make_status(FLASHONNX_INVALID_ARGUMENT,
                       "FlashAttention: the last dimension of input 'Q' is expected to be a "
                       "multiple of its number of heads "
                       "(query %lld, key and value %lld each), got %lld",
                       static_cast<long long>(q_heads), static_cast<long long>(kv_heads),
                       static_cast<long long>(width));
  }
  const bool time_major = node.layout == Layout::kTimeMajor;
  const int64_t batch = t.dims[time_major ? 1 : 0];
  const int64_t length = t.dims[time_major ? 0 : 1];
  const int64_t dim = width / heads;
  const bool interleaved = node.layout == Layout::kH3d;
  *q = {batch,
        q_heads,
        length,
        dim,
        time_major ? width : length * width,
        interleaved ? 3 * dim : dim,
        time_major ? batch * width : width};
  *k = *v = *q;
  k->heads = v->heads = kv_heads;
  k->offset = interleaved ? dim : q_heads * dim;
  v->offset = interleaved ? 2 * dim : (q_heads + kv_heads) * dim;
  return ok();
}

// Collects a size from several tensors.
class Agreement {
 public:
  explicit Agreement(Sizes sizes) : sizes_(sizes) {}

  flashonnx_status operator()(const char* input, const char* what, int64_t got,
                              int64_t* size) const {
    if (sizes_ == Sizes::kMaxima) *size = std::max(*size, got);
    if (*size == got || sizes_ == Sizes::kMaxima) return ok();
    return make_status(FLASHONNX_INVALID_ARGUMENT,
                       "FlashAttention: input '%s' is expected to have %s %lld, got %lld", input,
                       what, static_cast<long long>(*size), static_cast<long long>(got));
  }

 private:
  Sizes sizes_;
};

flashonnx_status fill_qkv(const Node& node, const Inputs& in, const Agreement& agree,
                          flashonnx_attention_params* p) {
  View q, k, v;
  if (node.packed()) {
    FLASHONNX_RETURN_IF_ERROR(view_packed(node, in[kQ], &q, &k, &v));
  } else {
    const int32_t rank = in[kQ].rank;
    if (rank != 3 && rank != 4) {
      return make_status(FLASHONNX_INVALID_ARGUMENT,
                         "FlashAttention: input 'Q' is expected to have 3 or 4 dimensions, got %d",
                         rank);
    }
    FLASHONNX_RETURN_IF_ERROR(view_of("Q", in[kQ], rank, node.attributes.q_num_heads, &q));
    FLASHONNX_RETURN_IF_ERROR(view_of("K", in[kK], rank, node.attributes.kv_num_heads, &k));
    FLASHONNX_RETURN_IF_ERROR(view_of("V", in[kV], rank, node.attributes.kv_num_heads, &v));
  }
  p->batch = q.batch;
  p->q_heads = q.heads;
  p->q_length = q.length;
  p->head_dim = q.dim;
  p->kv_heads = k.heads;
  p->kv_length = k.length;
  p->value_dim = v.dim;
  FLASHONNX_RETURN_IF_ERROR(agree("K", "a batch of", k.batch, &p->batch));
  FLASHONNX_RETURN_IF_ERROR(agree("V", "a batch of", v.batch, &p->batch));
  FLASHONNX_RETURN_IF_ERROR(agree("K", "a head dimension of", k.dim, &p->head_dim));
  FLASHONNX_RETURN_IF_ERROR(agree("V", "a number of heads of", v.heads, &p->kv_heads));
  FLASHONNX_RETURN_IF_ERROR(agree("V", "a length of", v.length, &p->kv_length));
  p->q = strided(in[kQ], q);
  p->k = strided(node.packed() ? in[kQ] : in[kK], k);
  p->v = strided(node.packed() ? in[kQ] : in[kV], v);
  return ok();
}

flashonnx_status fill_past(const Node& node, const Inputs& in, const Agreement& agree,
                           flashonnx_attention_params* p) {
  if (!node.has_input(kPastKey)) return ok();
  View key, value;
  FLASHONNX_RETURN_IF_ERROR(view_of("past_key", in[kPastKey], 4, p->kv_heads, &key));
  FLASHONNX_RETURN_IF_ERROR(view_of("past_value", in[kPastValue], 4, p->kv_heads, &value));
  p->past_length = key.length;
  FLASHONNX_RETURN_IF_ERROR(agree("past_key", "a batch of", key.batch, &p->batch));
  FLASHONNX_RETURN_IF_ERROR(agree("past_value", "a batch of", value.batch, &p->batch));
  FLASHONNX_RETURN_IF_ERROR(agree("past_value", "a length of", value.length, &p->past_length));
  FLASHONNX_RETURN_IF_ERROR(agree("past_key", "a head dimension of", key.dim, &p->head_dim));
  FLASHONNX_RETURN_IF_ERROR(agree("past_value", "a head dimension of", value.dim, &p->value_dim));
  p->past_k = strided(in[kPastKey], key);
  p->past_v = strided(in[kPastValue], value);
  p->causal_offset = p->past_length;
  return ok();
}

// NumPy's rules against (B, Hq, Sq, Sk) for all dimensions but the last, which never broadcasts: it
// may only be shorter.
flashonnx_status fill_mask(const Node& node, const Inputs& in, Sizes sizes,
                           flashonnx_attention_params* p) {
  if (!node.has_input(kMask)) return ok();
  const DenseTensor& mask = in[kMask];
  if (mask.rank < 1 || mask.rank > 4) {
    return make_status(
        FLASHONNX_INVALID_ARGUMENT,
        "FlashAttention: input 'attn_mask' is expected to have 1 to 4 dimensions, got %d",
        mask.rank);
  }
  const int64_t target[3] = {p->batch, p->q_heads, p->q_length};
  const int64_t keys = p->past_length + p->kv_length;
  p->mask = {mask.data, {0, 0, 0, 1}, mask.dtype, 0};
  p->mask_keys = mask.dims[mask.rank - 1];
  if (sizes == Sizes::kMaxima) p->mask_keys = std::min(p->mask_keys, keys);
  int64_t stride = mask.dims[mask.rank - 1];
  for (int i = mask.rank - 2, axis = 2; i >= 0; --i, --axis) {
    const int64_t size = mask.dims[i];
    if (size != 1 && size != target[axis] && sizes == Sizes::kExact) {
      return make_status(FLASHONNX_INVALID_ARGUMENT,
                         "FlashAttention: input 'attn_mask' is expected to broadcast to (%lld, "
                         "%lld, %lld, %lld), got %lld in "
                         "its dimension %d",
                         static_cast<long long>(target[0]), static_cast<long long>(target[1]),
                         static_cast<long long>(target[2]), static_cast<long long>(keys),
                         static_cast<long long>(size), i);
    }
    p->mask.stride[axis] = size == 1 ? 0 : stride;
    stride *= size;
  }
  return ok();
}

flashonnx_status fill_vector(const char* name, const DenseTensor& t, int64_t size, Sizes sizes,
                             flashonnx_tensor* tensor) {
  if (t.rank != 1 || (sizes == Sizes::kExact && t.dims[0] != size)) {
    return make_status(FLASHONNX_INVALID_ARGUMENT,
                       "FlashAttention: input '%s' is expected to have shape (%lld), got %d "
                       "dimensions, the first %lld",
                       name, static_cast<long long>(size), t.rank,
                       static_cast<long long>(t.dims[0]));
  }
  *tensor = {t.data, {1, 0, 0, 0}, t.dtype, 0};
  return ok();
}

void fill_outputs(const Node& node, const Inputs& in, const Outputs& out,
                  flashonnx_attention_params* p) {
  const int64_t width = p->q_heads * p->value_dim;
  const bool time_major = node.layout == Layout::kTimeMajor;
  p->o = {out[kY].data, {p->q_length * width, p->value_dim, width, 1}, out[kY].dtype, 0};
  if (in[kQ].rank == 4) {
    p->o.stride[1] = p->q_length * p->value_dim;
    p->o.stride[2] = p->value_dim;
  } else if (time_major) {
    p->o.stride[0] = width;
    p->o.stride[2] = p->batch * width;
  }
  const int64_t keys = p->past_length + p->kv_length;
  auto present = [&](const DenseTensor& t, int64_t dim) -> flashonnx_tensor {
    return {t.data, {p->kv_heads * keys * dim, keys * dim, dim, 1}, t.dtype, 0};
  };
  if (node.has_output(kPresentKey)) p->present_k = present(out[kPresentKey], p->head_dim);
  if (node.has_output(kPresentValue)) p->present_v = present(out[kPresentValue], p->value_dim);
  if (node.has_output(kLse)) {
    p->lse = {out[kLse].data, {p->q_heads * p->q_length, p->q_length, 1, 1}, out[kLse].dtype, 0};
  }
}

}  // namespace

bool Node::has_input(Input input) const {
  return std::find(inputs.begin(), inputs.begin() + input_count, input) !=
         inputs.begin() + input_count;
}

bool Node::has_output(Output output) const {
  return std::find(outputs.begin(), outputs.begin() + output_count, output) !=
         outputs.begin() + output_count;
}

flashonnx_status make_node(const Attributes& attributes, Node* node) {
  *node = {};
  node->attributes = attributes;
  FLASHONNX_RETURN_IF_ERROR(check_values(attributes));
  FLASHONNX_RETURN_IF_ERROR(parse_layout(attributes.qkv_layout, &node->layout));
  const char* usual = node->packed() ? "Q" : "Q,K,V";
  FLASHONNX_RETURN_IF_ERROR(parse_names("inputs",
                                        attributes.inputs.empty() ? usual : attributes.inputs,
                                        kInputNames, node->inputs.data(), &node->input_count));
  FLASHONNX_RETURN_IF_ERROR(parse_names("outputs", attributes.outputs, kOutputNames,
                                        node->outputs.data(), &node->output_count));
  return check_presence(*node);
}

flashonnx_status fill_params(const Node& node, const Inputs& inputs, const Outputs& outputs,
                             Sizes sizes, flashonnx_attention_params* params) {
  const Attributes& a = node.attributes;
  const Agreement agree(sizes);
  flashonnx_attention_init(params);
  FLASHONNX_RETURN_IF_ERROR(fill_qkv(node, inputs, agree, params));
  FLASHONNX_RETURN_IF_ERROR(fill_past(node, inputs, agree, params));
  FLASHONNX_RETURN_IF_ERROR(fill_mask(node, inputs, sizes, params));
  if (node.has_input(kKeyLengths)) {
    FLASHONNX_RETURN_IF_ERROR(fill_vector("nonpad_kv_seqlen", inputs[kKeyLengths], params->batch,
                                          sizes, &params->key_lengths));
    params->offset_from_lengths = 1;
  }
  if (node.has_input(kSinks)) {
    FLASHONNX_RETURN_IF_ERROR(
        fill_vector("sinks", inputs[kSinks], params->q_heads, sizes, &params->sinks));
  }
  fill_outputs(node, inputs, outputs, params);
  params->is_causal = a.is_causal != 0;
  params->window_left = a.left_window_size;
  params->window_right = a.right_window_size;
  params->scale = std::isnan(a.scale) ? 0 : a.scale;
  params->softcap = a.softcap;
  params->empty_row = a.empty_row == "mean" ? FLASHONNX_EMPTY_ROW_MEAN : FLASHONNX_EMPTY_ROW_ZERO;
  return ok();
}

}  // namespace flashonnx::trt

// The operators of the adapter: their tensors, and how they become the seam's struct.
#include "kernels/common/status.h"
#include "operator/cache.h"
#include "trt/node.h"

namespace flashonnx::trt {
namespace {

using Params = flashonnx_attention_params;

int64_t element_size(int32_t dtype) {
  if (dtype == FLASHONNX_INT8) return 1;
  if (dtype == FLASHONNX_INT64) return 8;
  return dtype == FLASHONNX_FLOAT32 || dtype == FLASHONNX_INT32 ? 4 : 2;
}

// Type and data, `offset` elements after the tensor's beginning (a packed projection).
void bind(const Tensor& from, flashonnx_tensor* to, int64_t offset = 0) {
  to->dtype = from.dtype;
  to->data = from.data == nullptr
                 ? nullptr
                 : static_cast<char*>(from.data) + offset * element_size(from.dtype);
}

void bind_all(std::span<const Port> inputs, const InputTensors& in, std::span<const Port> outputs,
              const OutputTensors& out, Params* params) {
  for (size_t i = 0; i < inputs.size(); ++i) bind(in[i], &(params->*inputs[i].field));
  for (size_t i = 0; i < outputs.size(); ++i) bind(out[i], &(params->*outputs[i].field));
}

// Q's tensor has all three.
void bind_packed(const Tensor& q, const PackedOffsets& packed, Params* params) {
  bind(q, &params->k, packed.k);
  bind(q, &params->v, packed.v);
}

flashonnx_status invalid(const char* attribute, const char* expected, const std::string& got) {
  return make_status(FLASHONNX_INVALID_ARGUMENT,
                     "FlashAttention: attribute '%s' is expected to be %s, got \"%.120s\"",
                     attribute, expected, got.c_str());
}

flashonnx_status require(const Node& node, std::initializer_list<int32_t> inputs,
                         const char* expected) {
  for (const int32_t input : inputs)
    if (!node.has_input(input)) return invalid("inputs", expected, node.given.inputs);
  return ok();
}

flashonnx_status require_pair(const Node& node, int32_t a, int32_t b, const char* expected) {
  return node.has_input(a) == node.has_input(b) ? ok()
                                                : invalid("inputs", expected, node.given.inputs);
}

}  // namespace

namespace attention {

constexpr Port kInputs[] = {{"Q", Type::kQ, &Params::q},
                            {"K", Type::kSame, &Params::k},
                            {"V", Type::kSame, &Params::v},
                            {"attn_mask", Type::kMask, &Params::mask},
                            {"past_key", Type::kSame, &Params::past_k},
                            {"past_value", Type::kSame, &Params::past_v},
                            {"nonpad_kv_seqlen", Type::kInteger, &Params::key_lengths},
                            {"sinks", Type::kFloat, &Params::sinks},
                            {"bias", Type::kSame, &Params::q_bias}};
constexpr Port kOutputs[] = {{"Y", Type::kSame, &Params::o},
                             {"present_key", Type::kSame, &Params::present_k},
                             {"present_value", Type::kSame, &Params::present_v},
                             {"lse", Type::kFloat, &Params::lse}};

const char* usual_inputs(const Attributes& attributes) {
  return attributes.layout == Layout::kSeparate ? "Q,K,V" : "Q";
}

flashonnx_status check_presence(const Node& node) {
  const std::string& list = node.given.inputs;
  const bool separate = node.attributes.layout == Layout::kSeparate;
  if (node.has_input(kK) != separate || node.has_input(kV) != separate) {
    return invalid(
        "inputs",
        separate ? "names that contain \"K\" and \"V\"" : "without \"K\" and \"V\": Q packs them",
        list);
  }
  return require_pair(node, kPastKey, kPastValue, "\"past_key\" and \"past_value\" together");
}

flashonnx_status fill_params(const Node& node, const InputTensors& in, const OutputTensors& out,
                             Sizes sizes, Params* params) {
  flashonnx_attention_init(params);
  PackedOffsets packed;
  OutputShapes unused;
  const InputShapes shapes = {in[kQ].shape,       in[kK].shape,       in[kV].shape,
                              in[kMask].shape,    in[kPastKey].shape, in[kPastValue].shape,
                              in[kLengths].shape, in[kSinks].shape,   in[kBias].shape};
  FLASHONNX_RETURN_IF_ERROR(describe(node.attributes, shapes, sizes, params, &packed, &unused));
  bind_all(kInputs, in, kOutputs, out, params);
  bind(in[kBias], &params->k_bias, packed.k_bias);
  bind(in[kBias], &params->v_bias, packed.v_bias);
  if (node.attributes.layout != Layout::kSeparate) bind_packed(in[kQ], packed, params);
  return ok();
}

}  // namespace attention

namespace cache {

constexpr Port kInputs[] = {{"Q", Type::kQ, &Params::q},
                            {"K", Type::kSame, &Params::k},
                            {"V", Type::kSame, &Params::v},
                            {"key_cache", Type::kSame, &Params::cache_k},
                            {"value_cache", Type::kSame, &Params::cache_v},
                            {"cache_lengths", Type::kInteger, &Params::cache_lengths},
                            {"block_table", Type::kInt32, &Params::block_table},
                            {"cu_seqlens_q", Type::kInt32, &Params::cu_seqlens_q},
                            {"cos_cache", Type::kTable, &Params::rotary_cos},
                            {"sin_cache", Type::kTable, &Params::rotary_sin},
                            {"position_ids", Type::kInt64, &Params::rotary_positions},
                            {"attn_mask", Type::kMask, &Params::mask},
                            {"sinks", Type::kFloat, &Params::sinks}};
constexpr Port kOutputs[] = {{"Y", Type::kSame, &Params::o},
                             {"present_key_cache", Type::kSame, &Params::present_k},
                             {"present_value_cache", Type::kSame, &Params::present_v},
                             {"lse", Type::kFloat, &Params::lse}};

const char* usual_inputs(const Attributes& attributes) {
  return attributes.layout == Layout::kSeparate ? "Q,K,V,key_cache,value_cache,cache_lengths"
                                                : "Q,key_cache,value_cache,cache_lengths";
}

flashonnx_status check_presence(const Node& node) {
  FLASHONNX_RETURN_IF_ERROR(
      require(node, {kKeyCache, kValueCache, kLengths},
              "names that contain \"key_cache\", \"value_cache\" and \"cache_lengths\""));
  const bool packed = node.attributes.layout != Layout::kSeparate;
  if (packed && (node.has_input(kK) || node.has_input(kV)))
    return invalid("inputs", "without \"K\" and \"V\": Q packs them", node.given.inputs);
  FLASHONNX_RETURN_IF_ERROR(require_pair(node, kK, kV, "\"K\" and \"V\" together"));
  FLASHONNX_RETURN_IF_ERROR(
      require_pair(node, kCos, kSin, "\"cos_cache\" and \"sin_cache\" together"));
  const bool key = node.has_output(kPresentKey), value = node.has_output(kPresentValue);
  if (key == value && (key || !(packed || node.has_input(kK)))) return ok();
  return invalid("outputs", "names that contain \"present_key_cache\" and \"present_value_cache\"",
                 node.given.outputs);
}

flashonnx_status fill_params(const Node& node, const InputTensors& in, const OutputTensors& out,
                             Sizes sizes, Params* params) {
  flashonnx_attention_init(params);
  PackedOffsets packed;
  CacheOutputs unused;
  const CacheShapes shapes = {in[kQ].shape,          in[kK].shape,          in[kV].shape,
                              in[kKeyCache].shape,   in[kValueCache].shape, in[kLengths].shape,
                              in[kBlockTable].shape, in[kSequences].shape,  in[kCos].shape,
                              in[kSin].shape,        in[kPositions].shape,  in[kMask].shape,
                              in[kSinks].shape};
  FLASHONNX_RETURN_IF_ERROR(
      describe_cache(node.attributes, shapes, sizes, params, &packed, &unused));
  bind_all(kInputs, in, kOutputs, out, params);
  if (node.attributes.layout != Layout::kSeparate) bind_packed(in[kQ], packed, params);
  return ok();
}

}  // namespace cache

namespace varlen {

constexpr Port kInputs[] = {{"Q", Type::kQ, &Params::q},
                            {"K", Type::kSame, &Params::k},
                            {"V", Type::kSame, &Params::v},
                            {"cu_seqlens_q", Type::kInt32, &Params::cu_seqlens_q},
                            {"cu_seqlens_k", Type::kInt32, &Params::cu_seqlens_k},
                            {"sinks", Type::kFloat, &Params::sinks}};
constexpr Port kOutputs[] = {{"Y", Type::kSame, &Params::o}, {"lse", Type::kFloat, &Params::lse}};

const char* usual_inputs(const Attributes&) { return "Q,K,V,cu_seqlens_q"; }

flashonnx_status check_presence(const Node& node) {
  return require(node, {kK, kV, kSequencesQ},
                 "names that contain \"K\", \"V\" and \"cu_seqlens_q\"");
}

flashonnx_status fill_params(const Node& node, const InputTensors& in, const OutputTensors& out,
                             Sizes sizes, Params* params) {
  flashonnx_attention_init(params);
  VarlenOutputs unused;
  const VarlenShapes shapes = {in[kQ].shape,          in[kK].shape,          in[kV].shape,
                               in[kSequencesQ].shape, in[kSequencesK].shape, in[kSinks].shape};
  FLASHONNX_RETURN_IF_ERROR(describe_varlen(node.attributes, shapes, sizes, params, &unused));
  bind_all(kInputs, in, kOutputs, out, params);
  if (!node.has_input(kSequencesK)) params->cu_seqlens_k = params->cu_seqlens_q;
  return ok();
}

}  // namespace varlen

const Operator kAttention = {
    "FlashAttention",        attention::kInputs,        attention::kOutputs,   0,
    attention::usual_inputs, attention::check_presence, attention::fill_params};
const Operator kCache = {"FlashAttentionKVCache", cache::kInputs,        cache::kOutputs,   1,
                         cache::usual_inputs,     cache::check_presence, cache::fill_params};
const Operator kVarlen = {"FlashAttentionVarlen", varlen::kInputs,        varlen::kOutputs,   0,
                          varlen::usual_inputs,   varlen::check_presence, varlen::fill_params};

}  // namespace flashonnx::trt

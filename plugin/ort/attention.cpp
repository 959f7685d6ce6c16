// flashonnx::FlashAttention.
#include <iterator>

#include "ort/infer.h"
#include "ort/run.h"

namespace flashonnx::ort {
namespace {

enum Input { kQ, kK, kV, kMask, kPastKey, kPastValue, kLengths, kSinks, kBias };
enum Output { kY, kPresentKey, kPresentValue, kLse };

constexpr Port kInputs[] = {
    {Port::kElement, true}, {Port::kElement, false}, {Port::kElement, false},
    {Port::kAny, false},    {Port::kElement, false}, {Port::kElement, false},
    {Port::kInt64, false},  {Port::kFloat, false},   {Port::kElement, false}};
constexpr Port kOutputs[] = {{Port::kElement, true},
                             {Port::kElement, false},
                             {Port::kElement, false},
                             {Port::kFloat, false}};

OrtStatus* run(const Kernel& kernel, OrtKernelContext* context) {
  Run run(kernel, context);
  FLASHONNX_ORT_RETURN_IF_ERROR(run.read());
  const InputShapes shapes = {run.shape(kQ),       run.shape(kK),       run.shape(kV),
                              run.shape(kMask),    run.shape(kPastKey), run.shape(kPastValue),
                              run.shape(kLengths), run.shape(kSinks),   run.shape(kBias)};
  flashonnx_attention_params& p = run.params();
  PackedOffsets packed;
  OutputShapes out;
  FLASHONNX_ORT_RETURN_IF_ERROR(
      to_ort(kernel.api, describe(kernel.attributes, shapes, Sizes::kExact, &p, &packed, &out)));
  FLASHONNX_ORT_RETURN_IF_ERROR(run.check_dtype(
      kMask, "attn_mask", 1u << FLASHONNX_BOOL | 1u << FLASHONNX_FLOAT32 | 1u << kernel.dtype,
      "bool, float32 or of Q's type"));
  const bool separate = kernel.attributes.layout == Layout::kSeparate;
  run.bind(kQ, &p.q);
  run.bind(separate ? kK : kQ, &p.k, packed.k);
  run.bind(separate ? kV : kQ, &p.v, packed.v);
  run.bind(kMask, &p.mask);
  run.bind(kPastKey, &p.past_k);
  run.bind(kPastValue, &p.past_v);
  run.bind(kLengths, &p.key_lengths);
  run.bind(kSinks, &p.sinks);
  run.bind(kBias, &p.q_bias);
  run.bind(kBias, &p.k_bias, packed.k_bias);
  run.bind(kBias, &p.v_bias, packed.v_bias);
  FLASHONNX_ORT_RETURN_IF_ERROR(run.bind_output(kY, out.y, kernel.dtype, &p.o));
  FLASHONNX_ORT_RETURN_IF_ERROR(
      run.bind_output(kPresentKey, out.present_key, kernel.dtype, &p.present_k));
  FLASHONNX_ORT_RETURN_IF_ERROR(
      run.bind_output(kPresentValue, out.present_value, kernel.dtype, &p.present_v));
  FLASHONNX_ORT_RETURN_IF_ERROR(run.bind_output(kLse, out.lse, FLASHONNX_FLOAT32, &p.lse));
  return run.execute();
}

}  // namespace

const Operator kAttention = {
    "FlashAttention", kInputs, std::size(kInputs), kOutputs, std::size(kOutputs), 0, run,
    infer_attention,  nullptr};

}  // namespace flashonnx::ort

// flashonnx::FlashAttentionKVCache and flashonnx::FlashAttentionVarlen.
#include "operator/cache.h"

#include <iterator>

#include "ort/infer.h"
#include "ort/run.h"

namespace flashonnx::ort {
namespace cache {

enum Input {
  kQ,
  kK,
  kV,
  kKeyCache,
  kValueCache,
  kLengths,
  kBlockTable,
  kSequences,
  kCos,
  kSin,
  kPositions,
  kMask,
  kSinks
};
enum Output { kY, kPresentKey, kPresentValue, kLse };

constexpr Port kInputs[] = {
    {Port::kElement, true}, {Port::kElement, false}, {Port::kElement, false},
    {Port::kElement, true}, {Port::kElement, true},  {Port::kAny, true},
    {Port::kInt32, false},  {Port::kInt32, false},   {Port::kAny, false},
    {Port::kAny, false},    {Port::kInt64, false},   {Port::kAny, false},
    {Port::kFloat, false}};
constexpr Port kOutputs[] = {{Port::kElement, true},
                             {Port::kElement, false},
                             {Port::kElement, false},
                             {Port::kFloat, false}};

size_t ORT_API_CALL in_place(int** inputs, int** outputs) {
  *inputs = new int[2]{kKeyCache, kValueCache};
  *outputs = new int[2]{kPresentKey, kPresentValue};
  return 2;
}

OrtStatus* check_dtypes(const Run& run, int32_t dtype) {
  const uint32_t table = 1u << FLASHONNX_FLOAT32 | 1u << dtype;
  FLASHONNX_ORT_RETURN_IF_ERROR(run.check_dtype(
      kLengths, "cache_lengths", 1u << FLASHONNX_INT32 | 1u << FLASHONNX_INT64, "int32 or int64"));
  FLASHONNX_ORT_RETURN_IF_ERROR(
      run.check_dtype(kCos, "cos_cache", table, "float32 or of Q's type"));
  FLASHONNX_ORT_RETURN_IF_ERROR(
      run.check_dtype(kSin, "sin_cache", table, "float32 or of Q's type"));
  return run.check_dtype(kMask, "attn_mask", table | 1u << FLASHONNX_BOOL,
                         "bool, float32 or of Q's type");
}

// Inputs are not written but as outputs: what a node appends has to go somewhere.
OrtStatus* bind_caches(const Kernel& kernel, const CacheOutputs& out, Run* run) {
  flashonnx_attention_params& p = run->params();
  FLASHONNX_ORT_RETURN_IF_ERROR(
      run->bind_output(kPresentKey, out.key_cache, kernel.dtype, &p.present_k));
  FLASHONNX_ORT_RETURN_IF_ERROR(
      run->bind_output(kPresentValue, out.value_cache, kernel.dtype, &p.present_v));
  const bool both = p.present_k.dtype != FLASHONNX_NONE && p.present_v.dtype != FLASHONNX_NONE;
  if (both || p.k.dtype == FLASHONNX_NONE) return nullptr;
  return to_ort(kernel.api,
                make_status(FLASHONNX_INVALID_ARGUMENT,
                            "FlashAttention: outputs 'present_key_cache' and 'present_value_cache' "
                            "are expected with 'K', got %s",
                            p.present_k.dtype != FLASHONNX_NONE   ? "only 'present_key_cache'"
                            : p.present_v.dtype != FLASHONNX_NONE ? "only 'present_value_cache'"
                                                                  : "none"));
}

OrtStatus* run(const Kernel& kernel, OrtKernelContext* context) {
  Run run(kernel, context);
  FLASHONNX_ORT_RETURN_IF_ERROR(run.read());
  const CacheShapes shapes = {run.shape(kQ),          run.shape(kK),          run.shape(kV),
                              run.shape(kKeyCache),   run.shape(kValueCache), run.shape(kLengths),
                              run.shape(kBlockTable), run.shape(kSequences),  run.shape(kCos),
                              run.shape(kSin),        run.shape(kPositions),  run.shape(kMask),
                              run.shape(kSinks)};
  flashonnx_attention_params& p = run.params();
  PackedOffsets packed;
  CacheOutputs out;
  FLASHONNX_ORT_RETURN_IF_ERROR(to_ort(
      kernel.api, describe_cache(kernel.attributes, shapes, Sizes::kExact, &p, &packed, &out)));
  FLASHONNX_ORT_RETURN_IF_ERROR(check_dtypes(run, kernel.dtype));
  const bool separate = kernel.attributes.layout == Layout::kSeparate;
  run.bind(kQ, &p.q);
  run.bind(separate ? kK : kQ, &p.k, packed.k);
  run.bind(separate ? kV : kQ, &p.v, packed.v);
  run.bind(kKeyCache, &p.cache_k);
  run.bind(kValueCache, &p.cache_v);
  run.bind(kLengths, &p.cache_lengths);
  run.bind(kBlockTable, &p.block_table);
  run.bind(kSequences, &p.cu_seqlens_q);
  run.bind(kCos, &p.rotary_cos);
  run.bind(kSin, &p.rotary_sin);
  run.bind(kPositions, &p.rotary_positions);
  run.bind(kMask, &p.mask);
  run.bind(kSinks, &p.sinks);
  FLASHONNX_ORT_RETURN_IF_ERROR(run.bind_output(kY, out.y, kernel.dtype, &p.o));
  FLASHONNX_ORT_RETURN_IF_ERROR(bind_caches(kernel, out, &run));
  FLASHONNX_ORT_RETURN_IF_ERROR(run.bind_output(kLse, out.lse, FLASHONNX_FLOAT32, &p.lse));
  return run.execute();
}

}  // namespace cache

namespace varlen {

enum Input { kQ, kK, kV, kSequencesQ, kSequencesK, kSinks };
enum Output { kY, kLse };

constexpr Port kInputs[] = {{Port::kElement, true}, {Port::kElement, true}, {Port::kElement, true},
                            {Port::kInt32, true},   {Port::kInt32, false},  {Port::kFloat, false}};
constexpr Port kOutputs[] = {{Port::kElement, true}, {Port::kFloat, false}};

OrtStatus* run(const Kernel& kernel, OrtKernelContext* context) {
  Run run(kernel, context);
  FLASHONNX_ORT_RETURN_IF_ERROR(run.read());
  const VarlenShapes shapes = {run.shape(kQ),          run.shape(kK),          run.shape(kV),
                               run.shape(kSequencesQ), run.shape(kSequencesK), run.shape(kSinks)};
  flashonnx_attention_params& p = run.params();
  VarlenOutputs out;
  FLASHONNX_ORT_RETURN_IF_ERROR(
      to_ort(kernel.api, describe_varlen(kernel.attributes, shapes, Sizes::kExact, &p, &out)));
  run.bind(kQ, &p.q);
  run.bind(kK, &p.k);
  run.bind(kV, &p.v);
  run.bind(kSequencesQ, &p.cu_seqlens_q);
  run.bind(run.shape(kSequencesK).present ? kSequencesK : kSequencesQ, &p.cu_seqlens_k);
  run.bind(kSinks, &p.sinks);
  FLASHONNX_ORT_RETURN_IF_ERROR(run.bind_output(kY, out.y, kernel.dtype, &p.o));
  FLASHONNX_ORT_RETURN_IF_ERROR(run.bind_output(kLse, out.lse, FLASHONNX_FLOAT32, &p.lse));
  return run.execute();
}

}  // namespace varlen

const Operator kCache = {"FlashAttentionKVCache",
                         cache::kInputs,
                         std::size(cache::kInputs),
                         cache::kOutputs,
                         std::size(cache::kOutputs),
                         1,
                         cache::run,
                         infer_cache,
                         cache::in_place};
const Operator kVarlen = {"FlashAttentionVarlen",
                          varlen::kInputs,
                          std::size(varlen::kInputs),
                          varlen::kOutputs,
                          std::size(varlen::kOutputs),
                          0,
                          varlen::run,
                          infer_varlen,
                          nullptr};

}  // namespace flashonnx::ort

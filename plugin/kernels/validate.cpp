#include "kernels/validate.h"

#include <algorithm>
#include <cmath>

#include "kernels/checks.h"

namespace flashonnx {
namespace {

flashonnx_status check_sizes(const Params& p) {
  FLASHONNX_RETURN_IF_ERROR(check_size("batch", p.batch, 0));
  FLASHONNX_RETURN_IF_ERROR(check_size("q_heads", p.q_heads, 1));
  FLASHONNX_RETURN_IF_ERROR(check_size("kv_heads", p.kv_heads, 1));
  FLASHONNX_RETURN_IF_ERROR(check_size("q_length", p.q_length, 0));
  FLASHONNX_RETURN_IF_ERROR(check_size("kv_length", p.kv_length, 0));
  FLASHONNX_RETURN_IF_ERROR(check_size("past_length", p.past_length, 0));
  FLASHONNX_RETURN_IF_ERROR(check_size("head_dim", p.head_dim, 1));
  FLASHONNX_RETURN_IF_ERROR(check_size("value_dim", p.value_dim, 1));
  if (p.q_heads % p.kv_heads != 0) {
    return make_status(
        FLASHONNX_INVALID_ARGUMENT,
        "FlashAttention: 'q_heads' is expected to be a multiple of 'kv_heads' (%lld), got %lld",
        static_cast<long long>(p.kv_heads), static_cast<long long>(p.q_heads));
  }
  // Packed tokens belong to one batch entry each.
  const bool ragged = present(p.cu_seqlens_q);
  const int64_t q_batch = ragged ? 1 : p.batch, k_batch = present(p.cu_seqlens_k) ? 1 : q_batch;
  const int64_t q_rows = ragged ? p.q_tokens : p.q_length;
  const int64_t k_rows = present(p.cu_seqlens_k) ? p.kv_tokens
                         : ragged                ? p.q_tokens
                                                 : p.past_length + p.kv_length;
  FLASHONNX_RETURN_IF_ERROR(check_elements("Q", q_batch, p.q_heads, q_rows, p.head_dim));
  FLASHONNX_RETURN_IF_ERROR(check_elements("K", k_batch, p.kv_heads, k_rows, p.head_dim));
  FLASHONNX_RETURN_IF_ERROR(check_elements("V", k_batch, p.kv_heads, k_rows, p.value_dim));
  FLASHONNX_RETURN_IF_ERROR(check_elements("Y", q_batch, p.q_heads, q_rows, p.value_dim));
  const int64_t keys = present(p.cache_k) ? p.cache_capacity : p.past_length + p.kv_length;
  if (p.mask.dtype != FLASHONNX_NONE && (p.mask_keys < -1 || p.mask_keys > keys)) {
    return make_status(FLASHONNX_INVALID_ARGUMENT,
                       "FlashAttention: the last dimension of 'attn_mask' is expected to be at "
                       "most the number of keys (%lld), got %lld",
                       static_cast<long long>(keys), static_cast<long long>(p.mask_keys));
  }
  return ok();
}

flashonnx_status check_tensors(const Params& p) {
  constexpr auto kRequired = Presence::kRequired;
  constexpr auto kOptional = Presence::kOptional;
  FLASHONNX_RETURN_IF_ERROR(check_tensor("Q", p.q, kRequired, kElements,
                                         "float32, float16, bfloat16 or float8_e4m3", true));
  const uint32_t same = bit(p.q.dtype);
  const char* name = dtype_name(p.q.dtype);
  const Presence new_keys = p.cache_k.dtype == FLASHONNX_NONE ? kRequired : kOptional;
  FLASHONNX_RETURN_IF_ERROR(check_tensor("K", p.k, new_keys, same, name, true));
  FLASHONNX_RETURN_IF_ERROR(check_tensor("V", p.v, new_keys, same, name, true));
  FLASHONNX_RETURN_IF_ERROR(
      check_tensor("Y", p.o, kRequired, kFloats, "float32, float16 or bfloat16", true));
  FLASHONNX_RETURN_IF_ERROR(check_tensor("past_key", p.past_k, kOptional, same, name, true));
  FLASHONNX_RETURN_IF_ERROR(check_tensor("past_value", p.past_v, kOptional, same, name, true));
  FLASHONNX_RETURN_IF_ERROR(check_tensor("present_key", p.present_k, kOptional, same, name, true));
  FLASHONNX_RETURN_IF_ERROR(
      check_tensor("present_value", p.present_v, kOptional, same, name, true));
  FLASHONNX_RETURN_IF_ERROR(check_tensor("q_bias", p.q_bias, kOptional, same, name, true));
  FLASHONNX_RETURN_IF_ERROR(check_tensor("k_bias", p.k_bias, kOptional, same, name, true));
  FLASHONNX_RETURN_IF_ERROR(check_tensor("v_bias", p.v_bias, kOptional, same, name, true));
  FLASHONNX_RETURN_IF_ERROR(
      check_tensor("lse", p.lse, kOptional, bit(FLASHONNX_FLOAT32), "float32", false));
  FLASHONNX_RETURN_IF_ERROR(
      check_tensor("sinks", p.sinks, kOptional, bit(FLASHONNX_FLOAT32), "float32", false));
  FLASHONNX_RETURN_IF_ERROR(
      check_tensor("attn_mask", p.mask, kOptional,
                   kFloats | bit(FLASHONNX_BOOL) | bit(FLASHONNX_INT8) | bit(FLASHONNX_INT32),
                   "bool, int8, int32, float32, float16 or bfloat16", false));
  FLASHONNX_RETURN_IF_ERROR(check_tensor("nonpad_kv_seqlen", p.key_lengths, kOptional,
                                         bit(FLASHONNX_INT32) | bit(FLASHONNX_INT64),
                                         "int32 or int64", false));
  return ok();
}

flashonnx_status check_combinations(const Params& p) {
  FLASHONNX_RETURN_IF_ERROR(check_pair("past_key", p.past_k, "past_value", p.past_v));
  FLASHONNX_RETURN_IF_ERROR(check_pair("present_key", p.present_k, "present_value", p.present_v));
  for (const flashonnx_tensor* bias : {&p.q_bias, &p.k_bias, &p.v_bias}) {
    if (present(*bias) && (present(p.cache_k) || present(p.cu_seqlens_q))) {
      return make_status(FLASHONNX_INVALID_ARGUMENT,
                         "FlashAttention: biases of projections are expected to be absent with a "
                         "cache or 'cu_seqlens_q', got one");
    }
  }
  const bool has_past = p.past_k.dtype != FLASHONNX_NONE;
  if (!has_past && p.past_length != 0)
    return invalid("past_length", "0 without 'past_key'", p.past_length);
  if (has_past && p.key_lengths.dtype != FLASHONNX_NONE) {
    return make_status(
        FLASHONNX_INVALID_ARGUMENT,
        "FlashAttention: 'nonpad_kv_seqlen' cannot be combined with 'past_key' and 'past_value'");
  }
  if (p.offset_from_lengths && !present(p.key_lengths) && !present(p.cache_k) &&
      !present(p.cu_seqlens_k)) {
    return invalid("offset_from_lengths", "0 without 'nonpad_kv_seqlen'", p.offset_from_lengths);
  }
  if (p.empty_row != FLASHONNX_EMPTY_ROW_ZERO && p.empty_row != FLASHONNX_EMPTY_ROW_MEAN) {
    return invalid("empty_row", "0 (zero) or 1 (mean)", p.empty_row);
  }
  if (p.empty_row == FLASHONNX_EMPTY_ROW_MEAN && p.sinks.dtype != FLASHONNX_NONE) {
    return make_status(FLASHONNX_INVALID_ARGUMENT,
                       "FlashAttention: empty_row \"mean\" cannot be combined with 'sinks': a row "
                       "whose only weight is its sink is 0");
  }
  return ok();
}

flashonnx_status check_scalars(const Params& p) {
  FLASHONNX_RETURN_IF_ERROR(check_reserved("params", p.reserved));
  FLASHONNX_RETURN_IF_ERROR(check_reserved("params' cache", p.reserved_cache));
  if (!std::isfinite(p.scale) || p.scale < 0) {
    return make_status(FLASHONNX_INVALID_ARGUMENT,
                       "FlashAttention: 'scale' is expected to be positive and finite, or 0 for 1 "
                       "/ sqrt(D), got %g",
                       p.scale);
  }
  if (!std::isfinite(p.softcap) || p.softcap < 0) {
    return make_status(FLASHONNX_INVALID_ARGUMENT,
                       "FlashAttention: 'softcap' is expected to be 0 (none) or positive, got %g",
                       p.softcap);
  }
  if (!(p.dropout >= 0 && p.dropout < 1)) {
    return make_status(FLASHONNX_INVALID_ARGUMENT,
                       "FlashAttention: 'dropout' is expected to be in [0, 1), got %g", p.dropout);
  }
  if (p.window_left < -1)
    return invalid("left_window_size", "-1 (none) or at least 0", p.window_left);
  if (p.window_right < -1)
    return invalid("right_window_size", "-1 (none) or at least 0", p.window_right);
  if (p.causal_offset < -kMaxSize || p.causal_offset > kMaxSize) {
    return invalid("causal_offset", "between -2^40 and 2^40", p.causal_offset);
  }
  return ok();
}

}  // namespace

flashonnx_status check_pair(const char* key_name, const flashonnx_tensor& key,
                            const char* value_name, const flashonnx_tensor& value) {
  if ((key.dtype == FLASHONNX_NONE) == (value.dtype == FLASHONNX_NONE)) return ok();
  const bool has_key = key.dtype != FLASHONNX_NONE;
  return make_status(FLASHONNX_INVALID_ARGUMENT,
                     "FlashAttention: '%s' is expected together with '%s', got only '%s'", key_name,
                     value_name, has_key ? key_name : value_name);
}

flashonnx_status check_alias(const char* kind, const char* source_name,
                             const flashonnx_tensor& present, const flashonnx_tensor& source) {
  if (present.data == nullptr || present.data != source.data ||
      std::equal(present.stride, present.stride + 3, source.stride)) {
    return ok();
  }
  return make_status(
      FLASHONNX_INVALID_ARGUMENT,
      "FlashAttention: output 'present_%s' shares the memory of '%s' and is expected "
      "to have its strides (a buffer with room for both), got others",
      kind, source_name);
}

flashonnx_status check_apart(const char* name, const flashonnx_tensor& written,
                             const char* other_name, const flashonnx_tensor& other) {
  if (written.data == nullptr || written.data != other.data) return ok();
  return make_status(FLASHONNX_INVALID_ARGUMENT,
                     "FlashAttention: '%s' is written and is expected to have other memory than "
                     "'%s', got the same",
                     name, other_name);
}

const char* dtype_name(int32_t dtype) {
  constexpr const char* kNames[] = {"none", "float32", "float16", "bfloat16", "float8_e4m3",
                                    "bool", "int8",    "int32",   "int64"};
  return dtype >= FLASHONNX_NONE && dtype <= FLASHONNX_INT64 ? kNames[dtype] : "unknown";
}

flashonnx_status validate(const Params& p) {
  if (p.device.kind != FLASHONNX_CPU && p.device.kind != FLASHONNX_CUDA) {
    return invalid("device.kind", "0 (CPU) or 1 (CUDA)", p.device.kind);
  }
  FLASHONNX_RETURN_IF_ERROR(check_sizes(p));
  FLASHONNX_RETURN_IF_ERROR(check_tensors(p));
  FLASHONNX_RETURN_IF_ERROR(check_combinations(p));
  FLASHONNX_RETURN_IF_ERROR(check_scalars(p));
  return check_cache(p);
}

flashonnx_status validate_data(const Params& p) {
  const int64_t queries = present(p.cu_seqlens_q) ? p.q_tokens : p.batch * p.q_length;
  const int64_t keys = present(p.cu_seqlens_k)   ? p.kv_tokens
                       : present(p.cu_seqlens_q) ? p.q_tokens
                                                 : p.batch * p.kv_length;
  const int64_t past = p.batch * p.past_length;
  const int64_t mask_keys = present(p.cache_k) ? p.cache_capacity : p.past_length + p.kv_length;
  const struct {
    const char* name;
    const flashonnx_tensor& tensor;
    int64_t rows;
  } kTensors[] = {
      {"Q", p.q, queries},
      {"K", p.k, keys},
      {"V", p.v, keys},
      {"Y", p.o, queries},
      {"lse", p.lse, queries},
      {"past_key", p.past_k, past},
      {"past_value", p.past_v, past},
      {"present_key", p.present_k, present(p.cache_k) ? 0 : keys + past},
      {"present_value", p.present_v, present(p.cache_k) ? 0 : keys + past},
      {"attn_mask", p.mask, p.mask_keys == 0 ? 0 : queries * mask_keys},
      {"nonpad_kv_seqlen", p.key_lengths, p.batch},
      {"sinks", p.sinks, 1},
      {"q_bias", p.q_bias, queries},
      {"k_bias", p.k_bias, keys},
      {"v_bias", p.v_bias, keys},
  };
  for (const auto& [name, tensor, rows] : kTensors)
    FLASHONNX_RETURN_IF_ERROR(check_data(name, tensor, rows));
  FLASHONNX_RETURN_IF_ERROR(check_alias("key", "past_key", p.present_k, p.past_k));
  FLASHONNX_RETURN_IF_ERROR(check_alias("value", "past_value", p.present_v, p.past_v));
  if (past > 0) {
    FLASHONNX_RETURN_IF_ERROR(check_apart("present_key", p.present_k, "past_value", p.past_v));
    FLASHONNX_RETURN_IF_ERROR(check_apart("present_value", p.present_v, "past_key", p.past_k));
  }
  return check_cache_data(p);
}

}  // namespace flashonnx

// Is the problem's cache, rotary embedding or ragged batch one that the operators define?
#include "kernels/checks.h"

namespace flashonnx {
namespace {

// Tokens, slots and pages are counted in 32 bits, a tile's width past the end included.
constexpr int64_t kMaxCount = (int64_t{1} << 31) - 1024;

constexpr uint32_t kInt32 = 1u << FLASHONNX_INT32, kInt64 = 1u << FLASHONNX_INT64;

flashonnx_status check_count(const char* name, int64_t value, int64_t least) {
  if (value >= least && value <= kMaxCount) return ok();
  return invalid(name, least ? "between 1 and 2^31 - 1024" : "between 0 and 2^31 - 1024", value);
}

flashonnx_status check_product(const char* name, int64_t a, int64_t b, int bits) {
  const int64_t limit = (int64_t{1} << bits) - 1024;
  if (a <= limit && b <= limit && a * b <= limit) return ok();
  return make_status(FLASHONNX_INVALID_ARGUMENT,
                     "FlashAttention: '%s' is expected to be at most 2^%d - 1024 with a cache, got "
                     "%lld x %lld",
                     name, bits, static_cast<long long>(a), static_cast<long long>(b));
}

flashonnx_status refuse(const flashonnx_tensor& tensor, const char* name, const char* where) {
  if (!present(tensor)) return ok();
  return make_status(FLASHONNX_INVALID_ARGUMENT,
                     "FlashAttention: '%s' is expected to be absent %s, got one", name, where);
}

flashonnx_status check_optional(const char* name, const flashonnx_tensor& tensor, uint32_t dtypes,
                                const char* expected, bool dense_rows = false) {
  return check_tensor(name, tensor, Presence::kOptional, dtypes, expected, dense_rows);
}

flashonnx_status check_ragged(const Params& p) {
  FLASHONNX_RETURN_IF_ERROR(check_optional("cu_seqlens_q", p.cu_seqlens_q, kInt32, "int32"));
  FLASHONNX_RETURN_IF_ERROR(check_optional("cu_seqlens_k", p.cu_seqlens_k, kInt32, "int32"));
  if (!present(p.cu_seqlens_q)) {
    FLASHONNX_RETURN_IF_ERROR(refuse(p.cu_seqlens_k, "cu_seqlens_k", "without 'cu_seqlens_q'"));
    if (p.q_tokens != 0) return invalid("q_tokens", "0 without 'cu_seqlens_q'", p.q_tokens);
  } else {
    constexpr const char* kWhere = "in a ragged batch (with 'cu_seqlens_q')";
    FLASHONNX_RETURN_IF_ERROR(check_count("q_tokens", p.q_tokens, 0));
    FLASHONNX_RETURN_IF_ERROR(refuse(p.mask, "attn_mask", kWhere));
    FLASHONNX_RETURN_IF_ERROR(refuse(p.key_lengths, "nonpad_kv_seqlen", kWhere));
    FLASHONNX_RETURN_IF_ERROR(refuse(p.past_k, "past_key", kWhere));
    if (!present(p.cache_k)) {
      FLASHONNX_RETURN_IF_ERROR(refuse(p.present_k, "present_key", kWhere));
      if (!present(p.cu_seqlens_k)) {
        return make_status(FLASHONNX_INVALID_ARGUMENT,
                           "FlashAttention: 'cu_seqlens_k' is expected with 'cu_seqlens_q' where "
                           "there is no cache, got none");
      }
    }
  }
  if (!present(p.cu_seqlens_k) && p.kv_tokens != 0)
    return invalid("kv_tokens", "0 without 'cu_seqlens_k'", p.kv_tokens);
  return check_count("kv_tokens", p.kv_tokens, 0);
}

flashonnx_status check_pages(const Params& p) {
  FLASHONNX_RETURN_IF_ERROR(check_optional("block_table", p.block_table, kInt32, "int32"));
  if (!present(p.block_table)) {
    if (p.page_size != 0) return invalid("page_size", "0 without 'block_table'", p.page_size);
    if (p.num_pages != 0) return invalid("num_pages", "0 without 'block_table'", p.num_pages);
    return check_elements("key_cache", p.batch, p.kv_heads, p.cache_capacity, p.head_dim);
  }
  FLASHONNX_RETURN_IF_ERROR(check_count("page_size", p.page_size, 1));
  FLASHONNX_RETURN_IF_ERROR(check_count("num_pages", p.num_pages, 0));
  if (p.cache_capacity % p.page_size != 0) {
    return make_status(FLASHONNX_INVALID_ARGUMENT,
                       "FlashAttention: 'cache_capacity' is expected to be a multiple of "
                       "'page_size' (%lld), got %lld",
                       static_cast<long long>(p.page_size),
                       static_cast<long long>(p.cache_capacity));
  }
  return check_elements("key_cache", p.num_pages, p.kv_heads, p.page_size, p.head_dim);
}

flashonnx_status check_rotary(const Params& p) {
  if (p.rotary_dim == 0) {
    FLASHONNX_RETURN_IF_ERROR(refuse(p.rotary_cos, "cos_cache", "with rotary_dim 0"));
    FLASHONNX_RETURN_IF_ERROR(refuse(p.rotary_sin, "sin_cache", "with rotary_dim 0"));
    FLASHONNX_RETURN_IF_ERROR(refuse(p.rotary_positions, "position_ids", "with rotary_dim 0"));
    if (p.rotary_length != 0)
      return invalid("rotary_length", "0 with rotary_dim 0", p.rotary_length);
    return ok();
  }
  if (p.rotary_dim < 0 || p.rotary_dim > p.head_dim || p.rotary_dim % 2 != 0) {
    return make_status(FLASHONNX_INVALID_ARGUMENT,
                       "FlashAttention: 'rotary_dim' is expected to be even and between 0 and the "
                       "head size (%lld), got %lld",
                       static_cast<long long>(p.head_dim), static_cast<long long>(p.rotary_dim));
  }
  if (!present(p.cache_k)) {
    return make_status(FLASHONNX_INVALID_ARGUMENT,
                       "FlashAttention: rotary embeddings ('rotary_dim' %lld) are expected with "
                       "'key_cache', got none",
                       static_cast<long long>(p.rotary_dim));
  }
  const struct {
    const char* name;
    const flashonnx_tensor& tensor;
  } kTables[] = {{"cos_cache", p.rotary_cos}, {"sin_cache", p.rotary_sin}};
  for (const auto& [name, tensor] : kTables) {
    FLASHONNX_RETURN_IF_ERROR(check_tensor(name, tensor, Presence::kRequired,
                                           bit(FLASHONNX_FLOAT32) | bit(p.q.dtype),
                                           "float32 or that of Q", false));
    if (tensor.stride[1] != 1) {
      return make_status(FLASHONNX_INVALID_ARGUMENT,
                         "FlashAttention: '%s' is expected to have innermost stride 1, got %lld",
                         name, static_cast<long long>(tensor.stride[1]));
    }
  }
  if (p.rotary_sin.dtype != p.rotary_cos.dtype) {
    return make_status(FLASHONNX_INVALID_ARGUMENT,
                       "FlashAttention: 'sin_cache' is expected to have the dtype of 'cos_cache' "
                       "(%s), got %s",
                       dtype_name(p.rotary_cos.dtype), dtype_name(p.rotary_sin.dtype));
  }
  if (p.rotary_interleaved != 0 && p.rotary_interleaved != 1)
    return invalid("rotary_interleaved", "0 or 1", p.rotary_interleaved);
  FLASHONNX_RETURN_IF_ERROR(check_count("rotary_length", p.rotary_length, 1));
  return check_optional("position_ids", p.rotary_positions, kInt64, "int64");
}

flashonnx_status check_no_cache(const Params& p) {
  constexpr const char* kWhere = "without 'key_cache'";
  FLASHONNX_RETURN_IF_ERROR(refuse(p.cache_lengths, "cache_lengths", kWhere));
  FLASHONNX_RETURN_IF_ERROR(refuse(p.block_table, "block_table", kWhere));
  if (p.cache_capacity != 0)
    return invalid("cache_capacity", "0 without 'key_cache'", p.cache_capacity);
  return check_pages(p);
}

flashonnx_status check_the_cache(const Params& p) {
  constexpr const char* kWhere = "with 'key_cache'";
  const uint32_t same = bit(p.q.dtype);
  const char* name = dtype_name(p.q.dtype);
  FLASHONNX_RETURN_IF_ERROR(check_optional("key_cache", p.cache_k, same, name, true));
  FLASHONNX_RETURN_IF_ERROR(check_optional("value_cache", p.cache_v, same, name, true));
  FLASHONNX_RETURN_IF_ERROR(check_tensor("cache_lengths", p.cache_lengths, Presence::kRequired,
                                         kInt32 | kInt64, "int32 or int64", false));
  FLASHONNX_RETURN_IF_ERROR(check_count("cache_capacity", p.cache_capacity, 0));
  FLASHONNX_RETURN_IF_ERROR(check_pages(p));
  FLASHONNX_RETURN_IF_ERROR(refuse(p.past_k, "past_key", kWhere));
  FLASHONNX_RETURN_IF_ERROR(refuse(p.key_lengths, "nonpad_kv_seqlen", kWhere));
  FLASHONNX_RETURN_IF_ERROR(refuse(p.cu_seqlens_k, "cu_seqlens_k", kWhere));
  FLASHONNX_RETURN_IF_ERROR(check_pair("K", p.k, "V", p.v));
  if (!present(p.k) && p.kv_length != 0) return invalid("kv_length", "0 without 'K'", p.kv_length);
  if (present(p.k) && p.kv_length != p.q_length) {
    return make_status(FLASHONNX_INVALID_ARGUMENT,
                       "FlashAttention: 'K' is expected to have the sequence length of 'Q' (%lld) "
                       "with 'key_cache', got %lld",
                       static_cast<long long>(p.q_length), static_cast<long long>(p.kv_length));
  }
  if (p.causal_offset != 0) return invalid("causal_offset", "0 with 'key_cache'", p.causal_offset);
  // Tokens, and what one has in Q, K and V together, are counted in 32 bits.
  if (!present(p.cu_seqlens_q))
    FLASHONNX_RETURN_IF_ERROR(check_product("batch * q_length", p.batch, p.q_length, 31));
  FLASHONNX_RETURN_IF_ERROR(check_product("q_heads * head_dim", p.q_heads, p.head_dim, 29));
  return check_product("q_heads * value_dim", p.q_heads, p.value_dim, 29);
}

// Caches that are only read may share their memory.
flashonnx_status check_written_caches(const Params& p) {
  if (!present(p.present_k))
    return present(p.k) ? check_apart("key_cache", p.cache_k, "value_cache", p.cache_v) : ok();
  FLASHONNX_RETURN_IF_ERROR(
      check_apart("present_key_cache", p.present_k, "value_cache", p.cache_v));
  FLASHONNX_RETURN_IF_ERROR(
      check_apart("present_value_cache", p.present_v, "key_cache", p.cache_k));
  return check_apart("present_key_cache", p.present_k, "present_value_cache", p.present_v);
}

}  // namespace

flashonnx_status check_cache(const Params& p) {
  FLASHONNX_RETURN_IF_ERROR(check_pair("key_cache", p.cache_k, "value_cache", p.cache_v));
  FLASHONNX_RETURN_IF_ERROR(present(p.cache_k) ? check_the_cache(p) : check_no_cache(p));
  FLASHONNX_RETURN_IF_ERROR(check_ragged(p));
  if (p.empty_row == FLASHONNX_EMPTY_ROW_MEAN && (present(p.cache_k) || present(p.cu_seqlens_q))) {
    return make_status(FLASHONNX_INVALID_ARGUMENT,
                       "FlashAttention: empty_row is expected to be \"zero\" with a cache or a "
                       "ragged batch, got \"mean\"");
  }
  return check_rotary(p);
}

flashonnx_status check_cache_data(const Params& p) {
  const bool cache = present(p.cache_k), ragged = present(p.cu_seqlens_q);
  const int64_t queries = ragged ? p.q_tokens : p.batch * p.q_length;
  const int64_t slots =
      present(p.block_table) ? p.num_pages * p.page_size : p.batch * p.cache_capacity;
  const struct {
    const char* name;
    const flashonnx_tensor& tensor;
    int64_t rows;
  } kTensors[] = {
      {"key_cache", p.cache_k, slots},
      {"value_cache", p.cache_v, slots},
      {"present_key_cache", p.present_k, cache ? slots : 0},
      {"present_value_cache", p.present_v, cache ? slots : 0},
      {"cache_lengths", p.cache_lengths, p.batch},
      {"block_table", p.block_table, p.batch * p.cache_capacity},
      {"cu_seqlens_q", p.cu_seqlens_q, 1},
      {"cu_seqlens_k", p.cu_seqlens_k, 1},
      {"cos_cache", p.rotary_cos, queries},
      {"sin_cache", p.rotary_sin, queries},
      {"position_ids", p.rotary_positions, queries},
  };
  for (const auto& [name, tensor, rows] : kTensors)
    FLASHONNX_RETURN_IF_ERROR(check_data(name, tensor, rows));
  if (!cache) return ok();
  FLASHONNX_RETURN_IF_ERROR(check_alias("key_cache", "key_cache", p.present_k, p.cache_k));
  FLASHONNX_RETURN_IF_ERROR(check_alias("value_cache", "value_cache", p.present_v, p.cache_v));
  return slots > 0 ? check_written_caches(p) : ok();
}

}  // namespace flashonnx

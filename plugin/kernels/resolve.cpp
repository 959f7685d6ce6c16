#include "kernels/resolve.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "kernels/cache/prepare.h"
#include "kernels/checks.h"
#include "kernels/cpu/concat.h"
#ifdef FLASHONNX_WITH_CUDA
#include "kernels/simt/concat.h"
#endif

namespace flashonnx {
namespace {

int64_t element_size(int32_t dtype) {
  if (dtype == FLASHONNX_FLOAT32) return 4;
  return dtype == FLASHONNX_FLOAT8_E4M3 ? 1 : 2;
}

void add_part(Part* part, int64_t bytes, Resolved* resolved) {
  *part = {resolved->bytes, (bytes + 255) / 256 * 256};
  resolved->bytes += part->bytes;
}

flashonnx_tensor dense(int32_t dtype, int64_t heads, int64_t length, int64_t dim) {
  return {nullptr, {heads * length * dim, length * dim, dim, 1}, dtype, 0};
}

flashonnx_tensor vector_of_int32() { return {nullptr, {1, 0, 0, 0}, FLASHONNX_INT32, 0}; }

// Past and new keys in one tensor: present_* or, if that is not asked for, workspace.
void resolve_past(Params& p, Resolved* resolved) {
  const bool in_workspace = !present(p.present_k);
  const int64_t keys = p.past_length + p.kv_length;
  if (in_workspace) {
    const int64_t rows = p.batch * p.kv_heads * keys, size = element_size(p.q.dtype);
    add_part(&resolved->keys, rows * p.head_dim * size, resolved);
    add_part(&resolved->values, rows * p.value_dim * size, resolved);
  }
  p.k = in_workspace ? dense(p.q.dtype, p.kv_heads, keys, p.head_dim) : p.present_k;
  p.v = in_workspace ? dense(p.q.dtype, p.kv_heads, keys, p.value_dim) : p.present_v;
  p.kv_length = keys;
  p.past_length = 0;
  p.past_k = p.past_v = p.present_k = p.present_v = {};
}

// The cache's keys, whose number the device knows, and queries that are rotated already.
void resolve_cache(Params& p, Resolved* resolved) {
  add_part(&resolved->key_lengths, (p.batch + 1) * 4, resolved);
  p.key_lengths = vector_of_int32();
  p.offset_from_lengths = 1;
  p.k = present(p.present_k) ? p.present_k : p.cache_k;
  p.v = present(p.present_v) ? p.present_v : p.cache_v;
  p.kv_length = p.cache_capacity;
  if (p.rotary_dim > 0) {
    const bool ragged = present(p.cu_seqlens_q);
    const int64_t token = p.q_heads * p.head_dim;
    const int64_t tokens = ragged ? p.q_tokens : p.batch * p.q_length;
    add_part(&resolved->queries, tokens * token * element_size(p.q.dtype), resolved);
    p.q = {nullptr, {ragged ? 0 : p.q_length * token, p.head_dim, token, 1}, p.q.dtype, 0};
  }
  p.present_k = p.present_v = p.cache_k = p.cache_v = p.cache_lengths = {};
  p.rotary_cos = p.rotary_sin = p.rotary_positions = {};
  p.rotary_dim = p.rotary_length = p.cache_capacity = 0;
}

// target = `past` rows, then `fresh` ones, of each of `batch` entries and key head.
flashonnx_status copy_rows(const Params& params, const flashonnx_tensor& target,
                           const flashonnx_tensor& past, const flashonnx_tensor& fresh, int64_t dim,
                           [[maybe_unused]] void* stream) {
  const int64_t size = element_size(params.q.dtype);
  const bool copy_past = params.past_length > 0 && target.data != past.data;
  if (params.batch == 0 || params.past_length + params.kv_length == 0) return ok();
  if (params.device.kind == FLASHONNX_CPU) {
    cpu::concat(params, target, past, fresh, dim, size, copy_past);
    return ok();
  }
#ifdef FLASHONNX_WITH_CUDA
  return concat_cuda(target, past, fresh, params.batch, params.kv_heads, params.past_length,
                     params.kv_length, dim, size, copy_past, stream);
#else
  return make_status(FLASHONNX_NOT_IMPLEMENTED,
                     "FlashAttention: this build of the library has no CUDA kernels");
#endif
}

// The cache as it was, where the caller wants the new one elsewhere.
flashonnx_status copy_cache(const Params& params, void* stream) {
  Params rows = params;
  rows.kv_length = 0;
  rows.past_length = present(params.block_table) ? params.page_size : params.cache_capacity;
  if (present(params.block_table)) rows.batch = params.num_pages;
  if (present(params.present_k)) {
    FLASHONNX_RETURN_IF_ERROR(
        copy_rows(rows, params.present_k, params.cache_k, {}, params.head_dim, stream));
    FLASHONNX_RETURN_IF_ERROR(
        copy_rows(rows, params.present_v, params.cache_v, {}, params.value_dim, stream));
  }
  return ok();
}

}  // namespace

void resolve(const Params& params, Resolved* resolved) {
  resolved->problem = params;
  Params& p = resolved->problem;
  const bool cache = present(p.cache_k);
  const int64_t keys = cache ? p.cache_capacity : p.past_length + p.kv_length;
  if (p.scale == 0) p.scale = 1 / std::sqrt(static_cast<float>(p.head_dim));
  if (p.mask_keys < 0) p.mask_keys = keys;
  // No position differs by more than this from another, so a wider window bounds nothing.
  const int64_t reach = p.q_length + keys + std::abs(p.causal_offset);
  if (p.window_left > reach) p.window_left = -1;
  if (p.window_right > reach) p.window_right = -1;

  resolved->concatenate = !cache && (present(p.past_k) || present(p.present_k));
  resolved->prepare = cache || present(p.cu_seqlens_q);
  if (present(p.past_k)) resolve_past(p, resolved);
  if (cache) resolve_cache(p, resolved);
  if (present(p.cu_seqlens_q)) {
    p.q_length = std::min(p.q_length, p.q_tokens);
    add_part(&resolved->cu_seqlens_q, (p.batch + 2) * 4, resolved);
    p.cu_seqlens_q = vector_of_int32();
  }
  if (present(p.cu_seqlens_k)) {
    p.kv_length = std::min(p.kv_length, p.kv_tokens);
    add_part(&resolved->cu_seqlens_k, (p.batch + 1) * 4, resolved);
    p.cu_seqlens_k = vector_of_int32();
  }
}

flashonnx_status prepare(const Params& params, Resolved* resolved, char* workspace, void* stream) {
  Params& p = resolved->problem;
  const auto place = [&](const Part& part, flashonnx_tensor* tensor) {
    if (part.bytes > 0) tensor->data = workspace + part.offset;
  };
  place(resolved->keys, &p.k);
  place(resolved->values, &p.v);
  place(resolved->key_lengths, &p.key_lengths);
  place(resolved->cu_seqlens_q, &p.cu_seqlens_q);
  place(resolved->cu_seqlens_k, &p.cu_seqlens_k);
  place(resolved->queries, &p.q);
  if (resolved->concatenate) {
    const flashonnx_tensor& keys = present(params.present_k) ? params.present_k : p.k;
    const flashonnx_tensor& values = present(params.present_v) ? params.present_v : p.v;
    FLASHONNX_RETURN_IF_ERROR(copy_rows(params, keys, params.past_k, params.k, p.head_dim, stream));
    FLASHONNX_RETURN_IF_ERROR(
        copy_rows(params, values, params.past_v, params.v, p.value_dim, stream));
  }
  if (!resolved->prepare) return ok();
  if (present(params.cache_k)) FLASHONNX_RETURN_IF_ERROR(copy_cache(params, stream));
  if (params.device.kind == FLASHONNX_CPU) return cpu::prepare(params, p);
#ifdef FLASHONNX_WITH_CUDA
  return prepare_cuda(params, p, stream);
#else
  return make_status(FLASHONNX_NOT_IMPLEMENTED,
                     "FlashAttention: this build of the library has no CUDA kernels");
#endif
}

}  // namespace flashonnx

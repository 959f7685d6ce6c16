#include "kernels/common/problem.h"

namespace flashonnx {
namespace {

View view(const flashonnx_tensor& tensor) {
  return {tensor.data, tensor.stride[0], tensor.stride[1], tensor.stride[2]};
}

bool present(const flashonnx_tensor& tensor) { return tensor.dtype != FLASHONNX_NONE; }

}  // namespace

Problem problem_of(const Params& params) {
  Problem p = {};
  p.q = view(params.q), p.k = view(params.k), p.v = view(params.v), p.o = view(params.o);
  p.output_dtype = params.o.dtype;
  if (present(params.lse)) p.lse = view(params.lse);
  p.key_limit = static_cast<int32_t>(params.kv_length);
  if (present(params.mask)) {
    p.mask = view(params.mask);
    p.mask_key = params.mask.stride[3];
    p.mask_dtype = params.mask.dtype;
    p.key_limit = static_cast<int32_t>(params.mask_keys);
  }
  if (present(params.key_lengths)) {
    p.key_lengths = params.key_lengths.data;
    p.key_lengths_stride = params.key_lengths.stride[0];
    p.lengths_64 = params.key_lengths.dtype == FLASHONNX_INT64;
  }
  if (present(params.sinks)) {
    p.sinks = static_cast<const float*>(params.sinks.data);
    p.sinks_stride = params.sinks.stride[0];
  }
  p.q_bias = {params.q_bias.data, params.q_bias.stride[1]};
  p.v_bias = {params.v_bias.data, params.v_bias.stride[1]};
  p.batch_heads = params.batch * params.q_heads;
  p.q_heads = params.q_heads;
  p.group = params.q_heads / params.kv_heads;
  p.q_length = static_cast<int32_t>(params.q_length);
  p.key_length = static_cast<int32_t>(params.kv_length);
  p.head_dim = static_cast<int32_t>(params.head_dim);
  p.value_dim = static_cast<int32_t>(params.value_dim);
  p.offset = params.causal_offset;
  p.offset_from_lengths = params.offset_from_lengths;
  p.left = params.window_left;
  p.right = params.is_causal ? 0 : params.window_right;
  p.empty_row_mean = params.empty_row == FLASHONNX_EMPTY_ROW_MEAN;
  p.scale = params.scale;
  p.softcap = params.softcap;
  p.ragged = ragged_of(params);
  p.pages = pages_of(params);
  return p;
}

Ragged ragged_of(const Params& params) {
  Ragged ragged = {};
  if (!present(params.cu_seqlens_q)) return ragged;
  ragged.queries = static_cast<const int32_t*>(params.cu_seqlens_q.data);
  if (present(params.cu_seqlens_k))
    ragged.keys = static_cast<const int32_t*>(params.cu_seqlens_k.data);
  ragged.sequences = static_cast<int32_t>(params.batch);
  ragged.tokens = static_cast<int32_t>(params.q_tokens);
  return ragged;
}

Pages pages_of(const Params& params) {
  Pages pages = {};
  if (!present(params.block_table)) return pages;
  pages.table = static_cast<const int32_t*>(params.block_table.data);
  pages.table_batch = params.block_table.stride[0];
  pages.table_page = params.block_table.stride[1];
  pages.k = params.k.stride[0], pages.v = params.v.stride[0];
  pages.count = static_cast<uint32_t>(params.num_pages);
  pages.size = Divider(static_cast<uint32_t>(params.page_size));
  return pages;
}

Rows query_rows(const Params& params) {
  if (present(params.cu_seqlens_q)) return {1, params.q_tokens};
  return {params.batch, params.q_length};
}

Rows key_rows(const Params& params) {
  if (present(params.block_table)) return {params.num_pages, params.page_size};
  if (present(params.cu_seqlens_k)) return {1, params.kv_tokens};
  return {params.batch, params.kv_length};
}

int32_t size_of(int32_t dtype) {
  if (dtype == FLASHONNX_BOOL || dtype == FLASHONNX_INT8 || dtype == FLASHONNX_FLOAT8_E4M3)
    return 1;
  if (dtype == FLASHONNX_INT64) return 8;
  return dtype == FLASHONNX_FLOAT32 || dtype == FLASHONNX_INT32 ? 4 : 2;
}

bool rows_aligned(const flashonnx_tensor& tensor, int64_t batch, int64_t heads, int64_t rows,
                  int64_t bytes) {
  const int64_t sizes[3] = {batch, heads, rows};
  const int64_t element_size = size_of(tensor.dtype);
  bool aligned = reinterpret_cast<uintptr_t>(tensor.data) % bytes == 0;
  for (int i = 0; i < 3; ++i)
    aligned &= sizes[i] <= 1 || tensor.stride[i] * element_size % bytes == 0;
  return aligned;
}

}  // namespace flashonnx

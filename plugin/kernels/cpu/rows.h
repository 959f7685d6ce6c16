// The rows of a task: which keys each may see, and how each ends.
#pragma once

#include "mask.h"
#include "task.h"

namespace flashonnx::cpu::FLASHONNX_CPU_ISA {

using Params = flashonnx_attention_params;

// Blocks are padded to whole vectors of rows.
constexpr int kPaddedBlockRows = (kBlockRows + kWidth - 1) / kWidth * kWidth;

// A batch entry's queries and keys: rows of the batch's tensors, or of packed tokens.
struct Sequence {
  int64_t q_batch, q_first;  // its first query
  int64_t queries;           // of which rows beyond params.q_length are left out
  int64_t k_batch, k_first;
  int64_t keys;
};

struct Rows {
  Sequence sequence;
  int count;
  bool same_keys;  // begin and end are those of all rows
  bool same_mask;
  int64_t head[kMaxRows];
  int64_t query[kMaxRows];
  int64_t begin[kMaxRows];  // keys outside of [begin, end) are masked by structure
  int64_t end[kMaxRows];
  const char* mask[kMaxRows];  // of key 0
  float maximum[kMaxRows + kPad];
  float sum[kMaxRows + kPad];
  bool started[kMaxRows / kBlockRows];  // whether O holds anything yet, for each block of rows
};

struct Range {
  int64_t begin;
  int64_t end;
};

template <typename T>
FLASHONNX_INLINE T* at(const flashonnx_tensor& tensor, int64_t b, int64_t h, int64_t s) {
  return static_cast<T*>(tensor.data) + b * tensor.stride[0] + h * tensor.stride[1] +
         s * tensor.stride[2];
}

inline int64_t clamp(int64_t x, int64_t low, int64_t high) {
  return x < low ? low : x > high ? high : x;
}

inline int64_t key_length(const Params& params, int64_t b) {
  const flashonnx_tensor& lengths = params.key_lengths;
  if (lengths.dtype == FLASHONNX_NONE) return params.kv_length;
  const int64_t i = b * lengths.stride[0];
  const int64_t length = lengths.dtype == FLASHONNX_INT64
                             ? static_cast<const int64_t*>(lengths.data)[i]
                             : static_cast<const int32_t*>(lengths.data)[i];
  return clamp(length, 0, params.kv_length);
}

inline Sequence sequence_of(const Params& params, int64_t b) {
  Sequence sequence{b, 0, params.q_length, b, 0, key_length(params, b)};
  if (params.cu_seqlens_q.dtype != FLASHONNX_NONE) {
    const int32_t* begin = static_cast<const int32_t*>(params.cu_seqlens_q.data) + b;
    sequence.q_batch = 0;
    sequence.q_first = begin[0];
    sequence.queries = begin[1] - begin[0];
  }
  if (params.cu_seqlens_k.dtype != FLASHONNX_NONE) {
    const int32_t* begin = static_cast<const int32_t*>(params.cu_seqlens_k.data) + b;
    sequence.k_batch = 0;
    sequence.k_first = begin[0];
    sequence.keys = clamp(begin[1] - begin[0], 0, params.kv_length);
  }
  return sequence;
}

inline void set_up_rows(const Params& params, const Plan& plan, int64_t b, int64_t kv_head,
                        int64_t first, int64_t total_rows, Rows& rows) {
  const flashonnx_tensor& mask = params.mask;
  const bool masked = mask.dtype != FLASHONNX_NONE;
  const int64_t length = rows.sequence.keys;
  const int64_t offset =
      params.causal_offset + (params.offset_from_lengths ? length - rows.sequence.queries : 0);
  const int64_t limit = masked && params.mask_keys < length ? params.mask_keys : length;
  for (int r = 0; r < plan.rows + kPad; ++r) {
    rows.maximum[r] = -kInfinity;
    rows.sum[r] = 0;
  }
  int64_t query = first / plan.group;
  int64_t member = first % plan.group;  // of the group of heads
  rows.count = static_cast<int>(clamp(total_rows - first, 0, plan.rows));
  rows.same_keys = !params.is_causal && params.window_left < 0 && params.window_right < 0;
  rows.same_mask = masked;
  for (bool& started : rows.started) started = false;
  for (int r = 0; r < rows.count; ++r) {
    const int64_t position = query + offset;
    int64_t end = limit;
    if (params.is_causal) end = clamp(position + 1, 0, end);
    if (params.window_right >= 0) end = clamp(position + params.window_right + 1, 0, end);
    rows.head[r] = kv_head * plan.group + member;
    rows.query[r] = query;
    rows.begin[r] = params.window_left < 0 ? 0 : clamp(position - params.window_left, 0, end);
    rows.end[r] = end;
    rows.mask[r] = nullptr;
    if (masked) {
      const int64_t element =
          b * mask.stride[0] + rows.head[r] * mask.stride[1] + query * mask.stride[2];
      rows.mask[r] = static_cast<const char*>(mask.data) + element * mask_bytes(mask.dtype);
      rows.same_mask &= rows.mask[r] == rows.mask[0];
    }
    if (++member == plan.group) {
      member = 0;
      ++query;
    }
  }
}

// The keys that some row of [first, first + count) sees; begin >= end if none does.
inline Range visible_keys(const Rows& rows, int first, int count) {
  if (rows.same_keys) return {rows.begin[0], rows.end[0]};
  Range range{INT64_MAX, 0};
  for (int r = first; r < first + count; ++r) {
    if (rows.begin[r] >= rows.end[r]) continue;
    range.begin = rows.begin[r] < range.begin ? rows.begin[r] : range.begin;
    range.end = rows.end[r] > range.end ? rows.end[r] : range.end;
  }
  return range;
}

template <typename T>
void store_row(const float* source, float factor, int64_t count, T* target) {
  int64_t d = 0;
  for (; d + kWidth <= count; d += kWidth) store(target + d, load(source + d) * factor);
  if (d < count) store_part(target + d, load(source + d) * factor, static_cast<int>(count - d));
}

inline void store_output(const Params& params, const Rows& rows, int r, const float* source,
                         float factor) {
  const int64_t count = params.value_dim, b = rows.sequence.q_batch, h = rows.head[r];
  const int64_t i = rows.sequence.q_first + rows.query[r];
  switch (params.o.dtype) {
    case FLASHONNX_FLOAT16:
      return store_row(source, factor, count, at<Half>(params.o, b, h, i));
    case FLASHONNX_BFLOAT16:
      return store_row(source, factor, count, at<BFloat16>(params.o, b, h, i));
    default:
      return store_row(source, factor, count, at<float>(params.o, b, h, i));
  }
}

// The mean of V over the batch entry's keys, for rows that see none; 0 where there are no keys. Not
// of pages: they are never asked for it.
template <typename T>
void mean_value(const Params& params, const Sequence& sequence, int64_t kv_head, float* mean) {
  const int64_t length = sequence.keys;
  double sum[kMaxHeadDim + kPad] = {};
  for (int64_t n = 0; n < length; ++n) {
    const T* value = at<const T>(params.v, sequence.k_batch, kv_head, sequence.k_first + n);
    for (int64_t d = 0; d < params.value_dim; d += kWidth) {
      const Vec x = load_upto(value + d, params.value_dim - d);
      for (int i = 0; i < kWidth; ++i) sum[d + i] += x[i];
    }
  }
  for (int64_t d = 0; d < params.value_dim; ++d) {
    mean[d] = length == 0 ? 0.0f : static_cast<float>(sum[d] / static_cast<double>(length));
  }
}

// Writes the rows' outputs. `o` holds their weighted sums, and anything at all for a row that saw
// no key.
template <typename T>
void finish_rows(const Params& params, const Plan& plan, int64_t kv_head, const Rows& rows,
                 float* o) {
  const bool sinks = params.sinks.dtype != FLASHONNX_NONE;
  const bool use_mean = params.empty_row == FLASHONNX_EMPTY_ROW_MEAN && !sinks;
  const float* empty_output = nullptr;
  for (int r = 0; r < rows.count; ++r) {
    const int64_t h = rows.head[r];
    const float maximum = rows.maximum[r];
    const float sum = rows.sum[r];
    float* row = o + r * plan.padded_value_dim;
    if (params.lse.dtype != FLASHONNX_NONE) {
      *at<float>(params.lse, rows.sequence.q_batch, h, rows.sequence.q_first + rows.query[r]) =
          sum == 0 ? -kInfinity : maximum + __builtin_logf(sum);
    }
    if (sum == 0) {
      if (empty_output == nullptr) {
        empty_output = row;
        __builtin_memset(row, 0, plan.padded_value_dim * sizeof(float));
        if (use_mean) mean_value<T>(params, rows.sequence, kv_head, row);
      }
      store_output(params, rows, r, empty_output, 1.0f);
      continue;
    }
    float factor = 1.0f / sum;
    if (sinks) {
      const float sink = static_cast<const float*>(params.sinks.data)[h * params.sinks.stride[0]];
      const float top = sink > maximum ? sink : maximum;
      const float weight = __builtin_expf(maximum - top);
      factor = weight / (sum * weight + __builtin_expf(sink - top));
    }
    store_output(params, rows, r, row, factor);
  }
}

}  // namespace flashonnx::cpu::FLASHONNX_CPU_ISA

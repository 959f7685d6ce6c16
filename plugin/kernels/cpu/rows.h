// The rows of a task: which keys each may see, and how each ends.
#pragma once

#include "mask.h"
#include "softmax.h"
#include "task.h"

namespace flashonnx::cpu::FLASHONNX_CPU_ISA {

using Params = flashonnx_attention_params;

struct Rows {
  int count;
  int64_t head[kMaxRows];
  int64_t query[kMaxRows];
  int64_t begin[kMaxRows];  // keys [begin, end) are not masked by structure
  int64_t end[kMaxRows];
  const char* mask[kMaxRows];  // of key 0
  float maximum[kMaxRows];
  float sum[kMaxRows];
};

template <typename T>
FLASHONNX_INLINE const T* at(const flashonnx_tensor& tensor, int64_t b, int64_t h, int64_t s) {
  return static_cast<const T*>(tensor.data) + b * tensor.stride[0] + h * tensor.stride[1] + s * tensor.stride[2];
}

inline int64_t clamp(int64_t x, int64_t low, int64_t high) {
  return x < low ? low : x > high ? high : x;
}

inline int64_t key_length(const Params& params, int64_t b) {
  const flashonnx_tensor& lengths = params.key_lengths;
  if (lengths.dtype == FLASHONNX_NONE) return params.kv_length;
  const int64_t i = b * lengths.stride[0];
  const int64_t length = lengths.dtype == FLASHONNX_INT64 ? static_cast<const int64_t*>(lengths.data)[i]
                                                          : static_cast<const int32_t*>(lengths.data)[i];
  return clamp(length, 0, params.kv_length);
}

inline void set_up_rows(const Params& params, const Plan& plan, int64_t b, int64_t kv_head, int64_t first, Rows& rows) {
  const int64_t length = key_length(params, b);
  const int64_t offset = params.causal_offset + (params.offset_from_lengths ? length - params.q_length : 0);
  const bool masked = params.mask.dtype != FLASHONNX_NONE;
  const int64_t limit = masked && params.mask_keys < length ? params.mask_keys : length;
  rows.count = static_cast<int>(clamp(plan.total_rows - first, 0, plan.rows));
  for (int r = 0; r < rows.count; ++r) {
    const int64_t query = (first + r) / plan.group;
    const int64_t position = query + offset;
    int64_t end = limit;
    if (params.is_causal) end = clamp(position + 1, 0, end);
    if (params.window_right >= 0) end = clamp(position + params.window_right + 1, 0, end);
    rows.head[r] = kv_head * plan.group + (first + r) % plan.group;
    rows.query[r] = query;
    rows.begin[r] = params.window_left < 0 ? 0 : clamp(position - params.window_left, 0, end);
    rows.end[r] = end;
    rows.mask[r] = masked ? at<char>(params.mask, 0, 0, 0) +
                                mask_bytes(params.mask.dtype) *
                                    (b * params.mask.stride[0] + rows.head[r] * params.mask.stride[1] +
                                     query * params.mask.stride[2])
                          : nullptr;
    rows.maximum[r] = -kInfinity;
    rows.sum[r] = 0;
  }
}

// The keys that any of rows [first, last) sees: false if none does.
inline bool visible_keys(const Rows& rows, int first, int last, int64_t& begin, int64_t& end) {
  begin = INT64_MAX;
  end = 0;
  for (int r = first; r < last; ++r) {
    if (rows.begin[r] >= rows.end[r]) continue;
    begin = rows.begin[r] < begin ? rows.begin[r] : begin;
    end = rows.end[r] > end ? rows.end[r] : end;
  }
  return begin < end;
}

template <typename T>
void store_row(const float* source, float factor, int64_t count, T* target) {
  int64_t d = 0;
  for (; d + kWidth <= count; d += kWidth) store(target + d, load(source + d) * factor);
  if (d < count) store_part(target + d, load(source + d) * factor, static_cast<int>(count - d));
}

inline void store_output(const Params& params, int64_t b, int64_t h, int64_t i, const float* source, float factor) {
  switch (params.o.dtype) {
    case FLASHONNX_FLOAT16:
      return store_row(source, factor, params.value_dim, const_cast<Half*>(at<Half>(params.o, b, h, i)));
    case FLASHONNX_BFLOAT16:
      return store_row(source, factor, params.value_dim, const_cast<BFloat16*>(at<BFloat16>(params.o, b, h, i)));
    default:
      return store_row(source, factor, params.value_dim, const_cast<float*>(at<float>(params.o, b, h, i)));
  }
}

// The mean of V over the batch entry's keys, for rows that see none; 0 where there are no keys.
template <typename T>
void mean_value(const Params& params, int64_t b, int64_t kv_head, float* mean) {
  const int64_t length = key_length(params, b);
  double sum[kMaxHeadDim + kPad] = {};
  for (int64_t n = 0; n < length; ++n) {
    const T* value = at<T>(params.v, b, kv_head, n);
    for (int64_t d = 0; d < params.value_dim; d += kWidth) {
      const Vec x = load_upto(value + d, params.value_dim - d);
      for (int i = 0; i < kWidth; ++i) sum[d + i] += x[i];
    }
  }
  for (int64_t d = 0; d < params.value_dim; ++d) {
    mean[d] = length == 0 ? 0.0f : static_cast<float>(sum[d] / static_cast<double>(length));
  }
}

// Writes the rows' outputs. `o` holds their weighted sums and is used up.
template <typename T>
void finish_rows(const Params& params, const Plan& plan, int64_t b, int64_t kv_head, Rows& rows, float* o) {
  const bool sinks = params.sinks.dtype != FLASHONNX_NONE;
  const float* mean = nullptr;
  for (int r = 0; r < rows.count; ++r) {
    const int64_t h = rows.head[r];
    float* row = o + r * plan.padded_value_dim;
    const float maximum = rows.maximum[r];
    float sum = rows.sum[r];
    const bool empty = sum == 0;
    if (params.lse.dtype != FLASHONNX_NONE) {
      *const_cast<float*>(at<float>(params.lse, b, h, rows.query[r])) =
          empty ? -kInfinity : maximum + __builtin_logf(sum);
    }
    float factor = empty ? 0.0f : 1.0f / sum;
    if (empty && !sinks && params.empty_row == FLASHONNX_EMPTY_ROW_MEAN) {
      if (mean == nullptr) {
        mean_value<T>(params, b, kv_head, row);
        mean = row;
      }
      store_output(params, b, h, rows.query[r], mean, 1.0f);
      continue;
    }
    if (sinks && !empty) {
      const float sink = static_cast<const float*>(params.sinks.data)[h * params.sinks.stride[0]];
      const float top = sink > maximum ? sink : maximum;
      const float weight = __builtin_expf(maximum - top);
      factor = weight / (sum * weight + __builtin_expf(sink - top));
    }
    store_output(params, b, h, rows.query[r], row, factor);
  }
}

}  // namespace flashonnx::cpu::FLASHONNX_CPU_ISA

// What a CUDA kernel is told, and which keys each query sees. Plain functions for host and device.
#pragma once

#include <cstdint>

#include "kernels/common/gather.h"

namespace flashonnx {

struct View {  // strides in elements; features are contiguous
  void* data;
  int64_t batch, head, row;
};

struct ProjectionBias {  // of Q's type, features side by side
  const void* data;
  int64_t head;  // stride in elements
};

struct Problem {
  View q, k, v, o;
  View lse;          // data null: not wanted
  View mask;         // data null: none
  int64_t mask_key;  // its fourth stride
  int32_t mask_dtype;
  int32_t output_dtype;
  const void* key_lengths;  // null: every batch entry has key_length keys
  int64_t key_lengths_stride;
  const float* sinks;
  int64_t sinks_stride;

  int64_t batch_heads;  // batch * q_heads
  int64_t q_heads;
  int64_t group;  // query heads per key head
  int32_t q_length, key_length, head_dim, value_dim;
  int32_t key_limit;  // keys that the mask covers; all without one

  int64_t offset;       // query i stands at key i + offset (+ key_lengths[b] - q_length)
  int64_t left, right;  // keys seen before and after that position; -1: all
  int32_t offset_from_lengths;
  int32_t lengths_64;  // key_lengths are int64
  int32_t empty_row_mean;

  float scale, softcap;

  Ragged ragged;  // where there is one, the batch strides of what it speaks of say nothing
  Pages pages;

  ProjectionBias q_bias, v_bias;  // of kernels that see to them
};

// Kernels count positions in 32 bits: q_length + kv_length of a problem may not exceed this.
constexpr int64_t kMaxPositions = (int64_t{1} << 31) - 1024;

Problem problem_of(const Params& params);

// Bytes of an element.
int32_t size_of(int32_t dtype);

// Whether every row of a tensor with these sizes starts at a multiple of `bytes`.
bool rows_aligned(const flashonnx_tensor& tensor, int64_t batch, int64_t heads, int64_t rows,
                  int64_t bytes);

FLASHONNX_HOST_DEVICE int64_t clamp(int64_t x, int64_t low, int64_t high) {
  return x < low ? low : x > high ? high : x;
}

FLASHONNX_HOST_DEVICE int32_t key_length_of(const Problem& problem, int64_t batch) {
  if (!problem.key_lengths) return problem.key_length;
  const int64_t at = batch * problem.key_lengths_stride;
  const int64_t length = problem.lengths_64 ? static_cast<const int64_t*>(problem.key_lengths)[at]
                                            : static_cast<const int32_t*>(problem.key_lengths)[at];
  return static_cast<int32_t>(clamp(length, 0, problem.key_length));
}

// Query i sees keys [lower(i), upper(i)), empty if upper <= lower. Both grow with i.
struct KeyRange {
  int32_t first;  // lower(i) before clamping is i + first
  int32_t last;
  int32_t limit;  // no query sees a key at or past it

  FLASHONNX_HOST_DEVICE int32_t lower(int32_t query) const {
    return query + first < 0 ? 0 : query + first;
  }
  FLASHONNX_HOST_DEVICE int32_t upper(int32_t query) const {
    return query + last < limit ? query + last : limit;
  }
};

// `length`: the batch entry's number of keys, `queries`: of queries. Clamping the bounds to
// [-q_length, key_length] keeps their meaning and lets everything below count in 32 bits; the
// launch has checked that q_length + key_length fits.
FLASHONNX_HOST_DEVICE KeyRange key_range(const Problem& problem, int32_t queries, int32_t length) {
  const int64_t offset =
      problem.offset + (problem.offset_from_lengths ? int64_t{length} - queries : 0);
  const int64_t first = problem.left < 0 ? -int64_t{problem.q_length} : offset - problem.left;
  const int64_t last = problem.right < 0 ? int64_t{problem.key_length} : offset + problem.right + 1;
  return {static_cast<int32_t>(clamp(first, -int64_t{problem.q_length}, problem.key_length)),
          static_cast<int32_t>(clamp(last, -int64_t{problem.q_length}, problem.key_length)),
          length < problem.key_limit ? length : problem.key_limit};
}

FLASHONNX_HOST_DEVICE KeyRange key_range(const Problem& problem, int32_t length) {
  return key_range(problem, problem.q_length, length);
}

}  // namespace flashonnx

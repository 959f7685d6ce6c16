// What the kernel is told, and which keys each query sees. Plain functions for host and device:
// tests call them on the host.
#pragma once

#include "kernels/common/gather.h"
#include "kernels/simt/config.h"

namespace flashonnx::simt {

struct View {  // strides in elements; features are contiguous
  void* data;
  int64_t batch, head, row;
};

struct Problem {
  View q, k, v, o;
  View lse;                    // data null: not wanted
  float* sums;                 // of a split: lse is its maxima, and these its sums; else null
  int64_t o_split, lse_split;  // strides between the splits' outputs
  View mask;                   // data null: none
  int64_t mask_key;            // its fourth stride
  int32_t mask_dtype;
  int32_t output_dtype;
  int32_t bfloat16;         // 16-bit elements of Q, K and V are bfloat16, not float16
  const void* key_lengths;  // null: every batch entry has key_length keys
  int64_t key_lengths_stride;
  const float* sinks;
  int64_t sinks_stride;

  int64_t blocks;       // tiles * batch * q_heads * splits
  int64_t batch_heads;  // batch * q_heads; of a ragged batch, whose tokens are in one run: q_heads
  int32_t tiles;        // of queries
  int32_t
      splits;  // blocks that share the keys of a tile of queries; their outputs are partial if > 1
  int32_t tiles_outermost;  // deal out the last tile of every head first: the longest work of a
                            // causal problem
  int32_t q_heads;
  int32_t group;  // query heads per key head
  int32_t q_length, key_length, head_dim, value_dim;
  int32_t key_limit;  // keys that the mask covers; all without one

  int64_t offset;       // query i stands at key i + offset (+ key_lengths[b] - q_length)
  int64_t left, right;  // keys seen before and after that position; -1: all
  int32_t offset_from_lengths;
  int32_t lengths_64;  // key_lengths are int64
  int32_t empty_row_mean;

  float scale, softcap;
  int32_t q_vectors, k_vectors, v_vectors, o_vectors;  // rows are aligned for vector accesses

  Ragged ragged;  // where there is one, the batch strides of what it speaks of are 0
  Pages pages;
};

struct Place {  // what a block works on
  int32_t batch, head, kv_head;
  int32_t first_query;
  int32_t split;
};

FLASHONNX_HOST_DEVICE Place place_of(const Problem& problem, int64_t block, int block_rows) {
  const int32_t split = static_cast<int32_t>(block % problem.splits);
  block /= problem.splits;
  const int64_t tile =
      problem.tiles_outermost ? block / problem.batch_heads : block % problem.tiles;
  const int64_t batch_head =
      problem.tiles_outermost ? block % problem.batch_heads : block / problem.tiles;
  const int32_t head = static_cast<int32_t>(batch_head % problem.q_heads);
  return {static_cast<int32_t>(batch_head / problem.q_heads), head, head / problem.group,
          static_cast<int32_t>(problem.tiles - 1 - tile) * block_rows, split};
}

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

// Keys [first, end) of a tile of queries, or the share of them that one of its splits takes: whole
// tiles of `tile_keys`.
struct KeySpan {
  int32_t first, end;
};
FLASHONNX_HOST_DEVICE KeySpan key_span(const KeyRange& range, int32_t first_query,
                                       int32_t last_query, int32_t split, int32_t splits,
                                       int32_t tile_keys) {
  const int32_t first = range.lower(first_query), end = range.upper(last_query);
  if (splits == 1 || end <= first) return {first, end};
  const int32_t tiles = (end - first - 1) / tile_keys + 1;
  const int32_t share = (tiles - 1) / splits + 1;
  const int64_t from = int64_t{first} + int64_t{split} * share * tile_keys,
                to = from + int64_t{share} * tile_keys;
  return {static_cast<int32_t>(clamp(from, first, end)),
          static_cast<int32_t>(clamp(to, first, end))};
}

}  // namespace flashonnx::simt

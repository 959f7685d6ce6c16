// The algorithm, once for every instruction set: for each tile of keys, for each block of rows:
// scores, online softmax, weighted sum.
#pragma once

#include "add_bias.h"
#include "direct.h"
#include "packed.h"
#include "rotary.h"
#include "rows.h"
#include "softmax.h"

namespace flashonnx::cpu::FLASHONNX_CPU_ISA {

struct Tile {
  int64_t first;
  int begin;  // columns [begin, end) are seen by some row; begin starts a panel
  int end;
  bool finite;          // no Inf or NaN among its values, as far as is known
  const float* biases;  // of all rows, or null
  const Absent* absent;
};

struct Scratch {
  float* q;
  float* o;
  float* scores;  // kBlockRows x kKeyTile
  float* biases;  // kKeyTile
};

// Reads a mask that all rows share. Answers whether it leaves any key of the tile.
inline bool read_shared_mask(const Params& params, const Rows& rows, const Scratch& scratch,
                             Tile& tile) {
  const int64_t first = (tile.first + tile.begin) * params.mask.stride[3];
  const int count = tile.end - tile.begin;
  float* biases = scratch.biases + tile.begin;
  read_mask(params.mask, rows.mask[0] + first * mask_bytes(params.mask.dtype), count, biases);
  tile.biases = all_equal(biases, count, 0.0f) ? nullptr : scratch.biases;
  return !all_equal(biases, count, -kInfinity);
}

// The biases of one row's columns [begin, end): the mask itself where it can be read as it is.
inline const float* read_own_mask(const Params& params, const char* mask, const Tile& tile,
                                  int begin, int end, float* biases) {
  const char* source =
      mask + (tile.first + begin) * params.mask.stride[3] * mask_bytes(params.mask.dtype);
  if (params.mask.dtype == FLASHONNX_FLOAT32 && params.mask.stride[3] == 1) {
    return reinterpret_cast<const float*>(source) - begin;
  }
  read_mask(params.mask, source, end - begin, biases + begin);
  return biases;
}

// Asked for before the scores are computed, a block's mask is there after them.
FLASHONNX_INLINE void prefetch_own_masks(const Params& params, const Rows& rows, const Tile& tile,
                                         int first, int count, int begin, int end) {
  if (params.mask.stride[3] != 1) return;
  const int64_t key_bytes = mask_bytes(params.mask.dtype);
  for (int r = first; r < first + count; ++r) {
    prefetch(rows.mask[r] + (tile.first + begin) * key_bytes, (end - begin) * key_bytes);
  }
}

// Softcap and masks for one row's scores. Returns its largest scores.
inline Vec complete_scores(const Params& params, const Tile& tile, const Rows& rows, int r,
                           int begin, int end, float* scores, float* own_biases) {
  if (params.softcap > 0) apply_softcap(scores, params.softcap, begin, end);
  const float* biases = tile.biases;
  if (rows.mask[r] != nullptr && !rows.same_mask) {
    biases = read_own_mask(params, rows.mask[r], tile, begin, end, own_biases);
  }
  Vec largest = broadcast(-kInfinity);
  if (biases != nullptr) largest = add_biases(scores, biases, begin, end, largest);
  bool cut = mask_outside(scores, begin, end, rows.begin[r] - tile.first, rows.end[r] - tile.first);
  if (tile.absent->any) cut |= mask_absent(scores, begin, end, *tile.absent);
  if (biases == nullptr || cut) {
    largest = find_largest(scores, begin, end, broadcast(-kInfinity));
  }
  return largest;
}

// Scores to weights for a block of rows, a step for all rows before the next: within a row each
// waits for the one before. `rescale` brings what was summed before to the new maxima.
inline void update_rows(const Params& params, const Tile& tile, Rows& rows, int first, int count,
                        int begin, int end, float* scores, float* own_biases, float* rescale) {
  Vec maxima[kPaddedBlockRows];
  Vec sums[kPaddedBlockRows];
  // Rows past `count` that share a vector with others may be the next block's: they stay as they
  // are.
  for (int i = count; i % kWidth != 0; ++i) {
    maxima[i] = broadcast(-kInfinity);
    sums[i] = Vec{};
  }
  float base[kPaddedBlockRows];
  for (int i = 0; i < count; ++i) {
    maxima[i] = complete_scores(params, tile, rows, first + i, begin, end, scores + i * kKeyTile,
                                own_biases);
  }
  for (int i = 0; i < count; i += kWidth) {
    float* maximum = rows.maximum + first + i;
    const Vec previous = load(maximum);
    const Vec largest = max(max_each(maxima + i), previous);
    const Vec finite = largest == -kInfinity ? Vec{} : largest;  // -inf - -inf would be NaN
    store(maximum, largest);
    store(base + i, finite);
    store(rescale + i, exp_nonpositive(previous - finite));
  }
  for (int i = 0; i < count; ++i) {
    float* row = scores + i * kKeyTile;
    sums[i] = tile.finite ? exponentiate<false>(row, begin, end, base[i])
                          : exponentiate<true>(row, begin, end, base[i]);
  }
  for (int i = 0; i < count; i += kWidth) {
    float* sum = rows.sum + first + i;
    store(sum, load(sum) * load(rescale + i) + sum_each(sums + i));
  }
}

template <typename Keys>
void process_block(const Params& params, const Plan& plan, const Scratch& scratch, const Keys& keys,
                   const Tile& tile, Rows& rows, int first, int count) {
  const Range seen = visible_keys(rows, first, count);
  const int begin =
      static_cast<int>(clamp(seen.begin - tile.first, tile.begin, kKeyTile)) / kPanel * kPanel;
  const int end = static_cast<int>(clamp(seen.end - tile.first, 0, tile.end));
  if (begin >= end) return;

  if (rows.mask[first] != nullptr && !rows.same_mask) {
    prefetch_own_masks(params, rows, tile, first, count, begin, end);
  }
  keys.compute_scores(scratch.q + first * plan.padded_head_dim, count, begin, end, scratch.scores);
  float rescale[kPaddedBlockRows];
  update_rows(params, tile, rows, first, count, begin, end, scratch.scores, scratch.biases,
              rescale);
  float* o = scratch.o + first * plan.padded_value_dim;
  bool& started = rows.started[first / kBlockRows];
  const float* factors = started ? rescale : nullptr;
  started = true;
  keys.accumulate(scratch.scores, count, begin, end, factors, o, tile.finite);
}

template <typename Keys>
void process_tiles(const Params& params, const Plan& plan, const Scratch& scratch, Keys& keys,
                   Rows& rows) {
  const Range seen = visible_keys(rows, 0, rows.count);
  if (seen.begin >= seen.end) return;
  for (int64_t first = seen.begin / kKeyTile * kKeyTile; first < seen.end; first += kKeyTile) {
    Tile tile{first,
              static_cast<int>(clamp(seen.begin - first, 0, kKeyTile)) / kPanel * kPanel,
              static_cast<int>(clamp(seen.end - first, 0, kKeyTile)),
              true,
              nullptr,
              &keys.absent};
    if (rows.same_mask && !read_shared_mask(params, rows, scratch, tile)) continue;
    tile.finite = keys.load_tile(first, tile.begin, tile.end);
    for (int r = 0; r < rows.count; r += kBlockRows) {
      process_block(params, plan, scratch, keys, tile, rows, r,
                    static_cast<int>(clamp(rows.count - r, 0, kBlockRows)));
    }
  }
}

template <typename T>
void run(const Params& params, const Plan& plan, int64_t task, float* memory) {
  const Scratch scratch{memory + plan.q, memory + plan.o, memory + plan.scores,
                        memory + plan.biases};
  const int64_t b = task / plan.row_tiles / params.kv_heads;
  const int64_t kv_head = task / plan.row_tiles % params.kv_heads;
  // Later queries see more keys under a causal mask: the long tasks come first.
  const int64_t row_tile = plan.row_tiles - 1 - task % plan.row_tiles;

  Rows rows;
  rows.sequence = sequence_of(params, b);
  const Sequence& sequence = rows.sequence;
  const int64_t total_rows = plan.group * clamp(sequence.queries, 0, params.q_length);
  if (row_tile * plan.rows >= total_rows) return;
  set_up_rows(params, plan, b, kv_head, row_tile * plan.rows, total_rows, rows);
  const bool paged = params.block_table.dtype != FLASHONNX_NONE;
  const int64_t k_batch = paged ? 0 : sequence.k_batch;
  const Source<T> source{params, at<const T>(params.k, k_batch, kv_head, sequence.k_first),
                         at<const T>(params.v, k_batch, kv_head, sequence.k_first),
                         paged ? at<const int32_t>(params.block_table, b, 0, 0) : nullptr};
  if (!paged) {
    prefetch_rows(source.keys, params.k.stride[2], kAhead, params.head_dim);
    prefetch_rows(source.values, params.v.stride[2], kAhead, params.value_dim);
  }
  for (int r = 0; r < rows.count; ++r) {
    const T* query =
        at<const T>(params.q, sequence.q_batch, rows.head[r], sequence.q_first + rows.query[r]);
    float* target = scratch.q + r * plan.padded_head_dim;
    for (int64_t d = 0; d < params.head_dim; d += kWidth) {
      store(target + d, load_upto(query + d, params.head_dim - d) * params.scale);
    }
  }
  if (total_rows <= kDirectRows) {
    Direct<T> keys{params, plan, source};
    process_tiles(params, plan, scratch, keys, rows);
  } else {
    Packed<T> keys{params, plan, source, memory + plan.k, memory + plan.v, memory + plan.gathered};
    process_tiles(params, plan, scratch, keys, rows);
  }
  finish_rows<T>(params, plan, kv_head, rows, scratch.o);
}

void run_task(const Params& params, const Plan& plan, int64_t task, float* scratch) {
  switch (params.q.dtype) {
    case FLASHONNX_FLOAT16:
      return run<Half>(params, plan, task, scratch);
    case FLASHONNX_BFLOAT16:
      return run<BFloat16>(params, plan, task, scratch);
    default:
      return run<float>(params, plan, task, scratch);
  }
}

}  // namespace flashonnx::cpu::FLASHONNX_CPU_ISA

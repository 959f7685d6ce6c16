// The algorithm, once for every instruction set: for each tile of keys, for each block of rows: scores, online softmax, weighted sum.
#pragma once

#include "rows.h"

namespace flashonnx::cpu::FLASHONNX_CPU_ISA {

// A tile of keys: columns [begin, end) of it are seen by some row.
struct Tile {
  int64_t first;
  int begin;
  int end;
  bool finite;  // no Inf or NaN among its values
};

struct Scratch {
  float* q;
  float* o;
  float* k;
  float* v;
  float* scores;  // kBlockRows x kKeyTile
};

// scores = Q K^T for columns [begin, end) of the tile, panel by panel so that one stays in the L1 cache for all rows.
inline void compute_scores(const Plan& plan, const Scratch& scratch, int64_t dim, int first, int rows, int begin, int end) {
  for (int n = begin; n < end; n += kPanel) {
    const Product product{scratch.q + first * plan.padded_head_dim, plan.padded_head_dim, scratch.k + n * dim, dim,
                          scratch.scores + n, kKeyTile, nullptr};
    multiply_panel(product, rows, end - n);
  }
}

// O = rescale O + weights V.
inline void accumulate(const Plan& plan, const Scratch& scratch, int64_t dim, int first, int rows, int begin, int end,
                       const float* rescale) {
  for (int64_t d = 0; d < dim; d += kPanel) {
    const Product product{scratch.scores + begin, kKeyTile, scratch.v + d * kKeyTile + begin * kPanel, end - begin,
                          scratch.o + first * plan.padded_value_dim + d, plan.padded_value_dim, rescale};
    multiply_panel(product, rows, static_cast<int>(clamp(dim - d, 0, kPanel)));
  }
}

// The same for a tile with Inf or NaN among its values, which must not reach rows that mask those keys: 0 * Inf is NaN.
inline void accumulate_seen(const Plan& plan, const Scratch& scratch, int64_t dim, int first, int rows, int begin, int end,
                            const float* rescale) {
  for (int r = 0; r < rows; ++r) {
    const float* weights = scratch.scores + r * kKeyTile;
    float* o = scratch.o + (first + r) * plan.padded_value_dim;
    for (int64_t d = 0; d < dim; d += kWidth) {
      const float* v = scratch.v + d / kPanel * kPanel * kKeyTile + d % kPanel;
      Vec sum = load(o + d) * rescale[r];
      for (int n = begin; n < end; ++n) {
        if (weights[n] != 0) sum += load(v + n * kPanel) * weights[n];
      }
      store(o + d, sum);
    }
  }
}

inline void mask_outside(float* scores, int begin, int end, int64_t from, int64_t to) {
  for (int n = begin; n < end && n < from; ++n) scores[n] = -kInfinity;
  for (int n = static_cast<int>(clamp(to, begin, end)); n < end; ++n) scores[n] = -kInfinity;
}

inline void process_block(const Params& params, const Plan& plan, const Scratch& scratch, const Tile& tile, BiasRow& bias,
                          Rows& rows, int first, int count) {
  int64_t from;
  int64_t to;
  if (!visible_keys(rows, first, first + count, from, to)) return;
  from = from - tile.first > tile.begin ? from - tile.first : tile.begin;
  to = to - tile.first < tile.end ? to - tile.first : tile.end;
  if (from >= to) return;
  const int begin = static_cast<int>(from) / kPanel * kPanel;
  const int end = static_cast<int>(to);
  const int padded_end = (end + kWidth - 1) / kWidth * kWidth;

  compute_scores(plan, scratch, params.head_dim, first, count, begin, end);
  float rescale[kBlockRows];
  for (int i = 0; i < count; ++i) {
    const int r = first + i;
    float* scores = scratch.scores + i * kKeyTile;
    if (params.softcap > 0) apply_softcap(scores, params.softcap, begin, end);
    if (rows.mask[r] != nullptr) {
      read_mask(bias, params.mask, rows.mask[r] + tile.first * params.mask.stride[3] * mask_bytes(params.mask.dtype),
                tile.begin, tile.end);
      if (!bias.neutral) add_bias(scores, bias.values, begin, end);
    }
    mask_outside(scores, begin, padded_end, rows.begin[r] - tile.first, rows.end[r] - tile.first);
    rescale[i] = tile.finite ? update_row<false>(scores, begin, end, rows.maximum[r], rows.sum[r])
                             : update_row<true>(scores, begin, end, rows.maximum[r], rows.sum[r]);
  }
  (tile.finite ? accumulate : accumulate_seen)(plan, scratch, params.value_dim, first, count, begin, end, rescale);
}

template <typename T>
void run(const Params& params, const Plan& plan, int64_t task, float* memory) {
  const Scratch scratch{memory + plan.q, memory + plan.o, memory + plan.k, memory + plan.v, memory + plan.scores};
  BiasRow bias;
  bias.values = memory + plan.bias;
  const int64_t head_task = task / plan.row_tiles;
  const int64_t b = head_task / params.kv_heads;
  const int64_t kv_head = head_task % params.kv_heads;
  // Later queries see more keys under a causal mask: the long tasks come first.
  const int64_t first_row = (plan.row_tiles - 1 - task % plan.row_tiles) * plan.rows;

  Rows rows;
  set_up_rows(params, plan, b, kv_head, first_row, rows);
  for (int r = 0; r < rows.count; ++r) {
    pack_query(at<T>(params.q, b, rows.head[r], rows.query[r]), params.head_dim, params.scale,
               scratch.q + r * plan.padded_head_dim);
  }
  __builtin_memset(scratch.o, 0, rows.count * plan.padded_value_dim * sizeof(float));

  int64_t begin;
  int64_t end;
  if (!visible_keys(rows, 0, rows.count, begin, end)) end = begin = 0;
  for (int64_t n = begin / kKeyTile * kKeyTile; n < end; n += kKeyTile) {
    Tile tile{n, static_cast<int>(clamp(begin - n, 0, kKeyTile) / kPanel * kPanel),
              static_cast<int>(clamp(end - n, 0, kKeyTile)), true};
    bias.source = nullptr;
    pack_keys(at<T>(params.k, b, kv_head, n), params.k.stride[2], params.head_dim, tile.begin, tile.end, scratch.k);
    tile.finite = pack_values(at<T>(params.v, b, kv_head, n), params.v.stride[2], params.value_dim, tile.begin, tile.end,
                              scratch.v);
    for (int r = 0; r < rows.count; r += kBlockRows) {
      process_block(params, plan, scratch, tile, bias, rows, r, static_cast<int>(clamp(rows.count - r, 0, kBlockRows)));
    }
  }
  finish_rows<T>(params, plan, b, kv_head, rows, scratch.o);
}

void run_task(const Params& params, const Plan& plan, int64_t task, float* scratch) {
  switch (params.q.dtype) {
    case FLASHONNX_FLOAT16: return run<Half>(params, plan, task, scratch);
    case FLASHONNX_BFLOAT16: return run<BFloat16>(params, plan, task, scratch);
    default: return run<float>(params, plan, task, scratch);
  }
}

}  // namespace flashonnx::cpu::FLASHONNX_CPU_ISA

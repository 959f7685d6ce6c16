// Key tiles for many rows: K transposed and V in panels, as float32, in the order in which the
// micro-kernels read them.
#pragma once

#include "gemm.h"
#include "softmax.h"
#include "source.h"
#include "task.h"

namespace flashonnx::cpu::FLASHONNX_CPU_ISA {

// Rows that are asked for before they are packed, past the tile's end too: about a cache miss
// ahead.
constexpr int kAhead = 16;

// Keys [begin, end) of a tile: panel n / kPanel holds dim x kPanel. Columns up to the next whole
// vector are zeros.
template <typename T>
void pack_keys(const T* source, int64_t stride, int64_t dim, int begin, int end, float* target) {
  for (int first = begin; first < end; first += kWidth) {
    float* panel = target + first / kPanel * kPanel * dim + first % kPanel;
    const T* keys = source + first * stride;
    prefetch_rows(keys + kAhead * stride, stride, kWidth, dim);
    int64_t d = 0;
    if (end - first >= kWidth) {
      for (; d + 4 <= dim; d += 4) {
        Vec rows[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) rows[i] = load_quads(keys + i * stride + d, 4 * stride);
        transpose_quads(rows);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) store(panel + (d + i) * kPanel, rows[i]);
      }
    }
    for (; d < dim; ++d) {
      T column[kWidth] = {};
      for (int n = 0; n < kWidth && first + n < end; ++n) column[n] = keys[n * stride + d];
      store(panel + d * kPanel, load(column));
    }
  }
}

// Values [begin, end) of a tile: panel d / kPanel holds kKeyTile x kPanel. Answers whether all are
// finite.
template <typename T>
bool pack_values(const T* source, int64_t stride, int64_t dim, int begin, int end, float* target) {
  FiniteCheck check;
  for (int n = begin; n < end; ++n) {
    prefetch_rows(source + (n + kAhead) * stride, stride, 1, dim);
    for (int64_t d = 0; d < dim; d += kWidth) {
      const Vec x = load_upto(source + n * stride + d, dim - d);
      check.add(x);
      store(target + d / kPanel * kKeyTile * kPanel + n * kPanel + d % kPanel, x);
    }
  }
  return check.finite();
}

// How rows meet the current tile of keys; Direct has the same functions.
template <typename T>
struct Packed {
  const flashonnx_attention_params& params;
  const Plan& plan;
  const Source<T>& source;
  float* k;
  float* v;
  float* gathered;  // rows of a tile that spans pages, of type T
  Absent absent{};

  // Makes keys [begin, end) of the tile at `first` current. Answers whether their values are
  // finite.
  bool load_tile(int64_t first, int begin, int end) {
    T* keys = reinterpret_cast<T*>(gathered);
    T* values = keys + kKeyTile * params.head_dim;
    absent.clear();
    bool finite = true;
    source.visit_runs(first, begin, end, [&](int n, int count, const T* key, const T* value) {
      if (key != nullptr && n == begin && n + count == end) {
        finite = pack(key, params.k.stride[2], value, params.v.stride[2], begin, end);
        return;
      }
      if (key == nullptr) absent.add(n, count);
      for (int i = n; i < n + count; ++i) {
        copy_row(key ? key + (i - n) * params.k.stride[2] : nullptr, params.head_dim,
                 keys + i * params.head_dim);
        copy_row(key ? value + (i - n) * params.v.stride[2] : nullptr, params.value_dim,
                 values + i * params.value_dim);
      }
      if (n + count < end) return;
      finite = pack(keys + begin * params.head_dim, params.head_dim,
                    values + begin * params.value_dim, params.value_dim, begin, end);
    });
    return finite;
  }

  // scores = Q K^T, panel by panel so that one stays in the L1 cache for all rows.
  void compute_scores(const float* q, int rows, int begin, int end, float* scores) const {
    for (int n = begin; n < end; n += kPanel) {
      multiply_panel({q, plan.padded_head_dim, k + n * params.head_dim, params.head_dim, scores + n,
                      kKeyTile, nullptr},
                     rows, end - n);
    }
  }

  // O = rescale O + weights V; rescale is null for the first tile, whose O holds nothing yet.
  void accumulate(const float* weights, int rows, int begin, int end, const float* rescale,
                  float* o, bool finite) const {
    if (!finite) return accumulate_seen(weights, rows, begin, end, rescale, o);
    for (int64_t d = 0; d < params.value_dim; d += kPanel) {
      multiply_panel({weights + begin, kKeyTile, v + d * kKeyTile + begin * kPanel, end - begin,
                      o + d, plan.padded_value_dim, rescale},
                     rows, params.value_dim - d);
    }
  }

 private:
  // The same for a tile with Inf or NaN among its values, which must not reach rows that mask those
  // keys: 0 * Inf is NaN.
  void accumulate_seen(const float* weights, int rows, int begin, int end, const float* rescale,
                       float* o) const {
    for (int r = 0; r < rows; ++r) {
      for (int64_t d = 0; d < params.value_dim; d += kWidth) {
        const float* column = v + d / kPanel * kPanel * kKeyTile + d % kPanel;
        float* target = o + r * plan.padded_value_dim + d;
        Vec sum = rescale == nullptr ? Vec{} : load(target) * rescale[r];
        for (int n = begin; n < end; ++n) {
          const float weight = weights[r * kKeyTile + n];
          if (!is_masked(weight)) sum += load(column + n * kPanel) * weight;
        }
        store(target, sum);
      }
    }
  }

  // From rows at `begin` on.
  bool pack(const T* keys, int64_t key_stride, const T* values, int64_t value_stride, int begin,
            int end) {
    pack_keys(keys - begin * key_stride, key_stride, params.head_dim, begin, end, k);
    return pack_values(values - begin * value_stride, value_stride, params.value_dim, begin, end,
                       v);
  }

  static void copy_row(const T* row, int64_t dim, T* target) {
    if (row == nullptr) {
      __builtin_memset(target, 0, dim * sizeof(T));
    } else {
      __builtin_memcpy(target, row, dim * sizeof(T));
    }
  }
};

}  // namespace flashonnx::cpu::FLASHONNX_CPU_ISA

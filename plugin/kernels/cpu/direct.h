// Key tiles for a few rows, as when decoding: K and V are read where they are, since each element
// is used only once or twice.
#pragma once

#include "simd.h"
#include "softmax.h"
#include "source.h"
#include "task.h"

namespace flashonnx::cpu::FLASHONNX_CPU_ISA {

template <typename T>
struct Direct {
  const flashonnx_attention_params& params;
  const Plan& plan;
  const Source<T>& source;
  Absent absent{};
  const T* key_rows[kKeyTile] = {};
  const T* value_rows[kKeyTile] = {};

  bool load_tile(int64_t first, int begin, int end) {
    absent.clear();
    source.visit_runs(first, begin, end, [&](int n, int count, const T* key, const T* value) {
      if (key == nullptr) absent.add(n, count);
      const int64_t key_step = key ? params.k.stride[2] : 0;
      const int64_t value_step = key ? params.v.stride[2] : 0;
      if (key == nullptr) key = value = reinterpret_cast<const T*>(kZeros);
      for (int i = 0; i < count; ++i) {
        key_rows[n + i] = key + i * key_step;
        value_rows[n + i] = value + i * value_step;
      }
    });
    return false;
  }

  void compute_scores(const float* q, int rows, int begin, int end, float* scores) const {
    for (int n = begin; n < end; n += kWidth) {
      const T* lanes[kWidth];
      for (int i = 0; i < kWidth; ++i) {
        // Lanes past the end repeat the last key; their scores are masked like all columns past the
        // end.
        lanes[i] = key_rows[n + i < end ? n + i : end - 1];
      }
      for (int i = 0; i < kWidth && n + i < end; ++i)
        prefetch_far(value_rows[n + i], params.value_dim);
      for (int r = 0; r < rows; ++r) {
        store(scores + r * kKeyTile + n, dot_products(q + r * plan.padded_head_dim, lanes));
      }
    }
  }

  void accumulate(const float* weights, int rows, int begin, int end, const float* rescale,
                  float* o, bool) const {
    const int64_t dim = params.value_dim;
    int64_t d = 0;
    for (; d + 8 * kWidth <= dim; d += 8 * kWidth)
      accumulate_columns<8>(weights, rows, begin, end, d, rescale, o);
    for (; d + 4 * kWidth <= dim; d += 4 * kWidth)
      accumulate_columns<4>(weights, rows, begin, end, d, rescale, o);
    for (; d < dim; d += kWidth) accumulate_columns<1>(weights, rows, begin, end, d, rescale, o);
  }

 private:
  // Into the L2 cache. While one of K and V is worked on, the other is on its way: K's next tile
  // during the sums of V. (Hardware runs ahead of either by less than that work takes.)
  static FLASHONNX_INLINE void prefetch_far(const T* row, int64_t dim) {
    for (int64_t d = 0; d < dim; d += 64 / static_cast<int64_t>(sizeof(T)))
      __builtin_prefetch(row + d, 0, 2);
  }

  Vec dot_products(const float* query, const T* const (&lanes)[kWidth]) const {
    Vec sums[kWidth] = {};
    int64_t d = 0;
    for (; d + kWidth <= params.head_dim; d += kWidth) {
      const Vec x = load(query + d);
#pragma GCC unroll 16
      for (int i = 0; i < kWidth; ++i) sums[i] += x * load(lanes[i] + d);
    }
    if (d < params.head_dim) {
      const Vec x = load(query + d);
#pragma GCC unroll 16
      for (int i = 0; i < kWidth; ++i)
        sums[i] += x * load_part(lanes[i] + d, static_cast<int>(params.head_dim - d));
    }
    return sum_each(sums);
  }

  // The first row looks whether the values are finite while it reads them: a pass before would cost
  // as much as the sums.
  template <int kVectors>
  void accumulate_columns(const float* weights, int rows, int begin, int end, int64_t d,
                          const float* rescale, float* o) const {
    bool finite = true;
    for (int r = 0; r < rows; ++r) {
      const float* row = weights + r * kKeyTile;
      Vec sums[kVectors] = {};
      if (r == 0) {
        finite = add_checked(row, begin, end, d, sums);
      } else if (finite) {
        add_values<false>(row, begin, end, d, sums);
      }
      if (!finite) {
        for (Vec& sum : sums) sum = Vec{};
        add_values<true>(row, begin, end, d, sums);
      }
      float* target = o + r * plan.padded_value_dim + d;
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i) {
        float* part = target + i * kWidth;
        store(part, rescale == nullptr ? sums[i] : load(part) * rescale[r] + sums[i]);
      }
    }
  }

  template <int kVectors>
  bool add_checked(const float* weights, int begin, int end, int64_t d,
                   Vec (&sums)[kVectors]) const {
    const bool more = d == 0 && end == kKeyTile && source.table == nullptr;
    FiniteCheck checks[2];
    for (int n = begin; n < end; ++n) {
      if (more) prefetch_far(key_rows[n] + kKeyTile * params.k.stride[2], params.head_dim);
      const Vec weight = broadcast(weights[n]);
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i) {
        const Vec value = value_vector<kVectors>(n, d + i * kWidth);
        sums[i] += weight * value;
        checks[i % 2].add(value);
      }
    }
    return checks[0].finite() && checks[1].finite();
  }

  template <bool kSeen, int kVectors>
  void add_values(const float* weights, int begin, int end, int64_t d,
                  Vec (&sums)[kVectors]) const {
    for (int n = begin; n < end; ++n) {
      if (kSeen && is_masked(weights[n])) continue;
      const Vec weight = broadcast(weights[n]);
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i)
        sums[i] += weight * value_vector<kVectors>(n, d + i * kWidth);
    }
  }

  // One of several lies within the row.
  template <int kVectors>
  FLASHONNX_INLINE Vec value_vector(int n, int64_t d) const {
    return kVectors == 1 ? load_upto(value_rows[n] + d, params.value_dim - d)
                         : load(value_rows[n] + d);
  }
};

}  // namespace flashonnx::cpu::FLASHONNX_CPU_ISA

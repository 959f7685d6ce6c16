// Key tiles for a few rows, as when decoding: K and V are read where they are, since each element
// is used only once or twice.
#pragma once

#include "simd.h"
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
    FiniteCheck check;
    for (int n = begin; n < end; ++n) {
      for (int64_t d = 0; d < params.value_dim; d += kWidth) {
        check.add(load_upto(value_rows[n] + d, params.value_dim - d));
      }
    }
    return check.finite();
  }

  void compute_scores(const float* q, int rows, int begin, int end, float* scores) const {
    for (int n = begin; n < end; n += kWidth) {
      const T* lanes[kWidth];
      for (int i = 0; i < kWidth; ++i) {
        // Lanes past the end repeat the last key; their scores are masked like all columns past the
        // end.
        lanes[i] = key_rows[n + i < end ? n + i : end - 1];
      }
      for (int r = 0; r < rows; ++r) {
        store(scores + r * kKeyTile + n, dot_products(q + r * plan.padded_head_dim, lanes));
      }
    }
  }

  void accumulate(const float* weights, int rows, int begin, int end, const float* rescale,
                  float* o) const {
    accumulate_rows<false>(weights, rows, begin, end, rescale, o);
  }

  void accumulate_seen(const float* weights, int rows, int begin, int end, const float* rescale,
                       float* o) const {
    accumulate_rows<true>(weights, rows, begin, end, rescale, o);
  }

 private:
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

  template <bool kSeen>
  void accumulate_rows(const float* weights, int rows, int begin, int end, const float* rescale,
                       float* o) const {
    for (int r = 0; r < rows; ++r) {
      const float* factor = rescale == nullptr ? nullptr : rescale + r;
      const int64_t dim = params.value_dim;
      int64_t d = 0;
      for (; d + 8 * kWidth <= dim; d += 8 * kWidth)
        accumulate_columns<kSeen, 8>(weights, begin, end, d, factor, o);
      for (; d + 4 * kWidth <= dim; d += 4 * kWidth)
        accumulate_columns<kSeen, 4>(weights, begin, end, d, factor, o);
      for (; d < dim; d += kWidth) accumulate_columns<kSeen, 1>(weights, begin, end, d, factor, o);
      weights += kKeyTile;
      o += plan.padded_value_dim;
    }
  }

  template <bool kSeen, int kVectors>
  void accumulate_columns(const float* weights, int begin, int end, int64_t d, const float* rescale,
                          float* o) const {
    Vec sums[kVectors] = {};
    for (int n = begin; n < end; ++n) {
      if (kSeen && weights[n] == 0) continue;
      const Vec weight = broadcast(weights[n]);
      const T* value = value_rows[n] + d;
      if constexpr (kVectors == 1) {
        sums[0] += weight * load_upto(value, params.value_dim - d);
      } else {
#pragma GCC unroll 8
        for (int i = 0; i < kVectors; ++i) sums[i] += weight * load(value + i * kWidth);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {
      float* target = o + d + i * kWidth;
      store(target, rescale == nullptr ? sums[i] : load(target) * *rescale + sums[i]);
    }
  }
};

}  // namespace flashonnx::cpu::FLASHONNX_CPU_ISA

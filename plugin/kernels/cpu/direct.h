// Key tiles for a few rows, as when decoding: K and V are read where they are, since each element is used only once or twice.
#pragma once

#include "simd.h"
#include "task.h"

namespace flashonnx::cpu::FLASHONNX_CPU_ISA {

template <typename T>
struct Direct {
  const flashonnx_attention_params& params;
  const Plan& plan;
  const T* keys;
  const T* values;
  const T* tile_keys = nullptr;
  const T* tile_values = nullptr;

  bool load_tile(int64_t first, int begin, int end) {
    tile_keys = keys + first * params.k.stride[2];
    tile_values = values + first * params.v.stride[2];
    Vec zero{};
    for (int n = begin; n < end; ++n) {
      for (int64_t d = 0; d < params.value_dim; d += kWidth) {
        zero += load_upto(tile_values + n * params.v.stride[2] + d, params.value_dim - d) * 0.0f;
      }
    }
    return !any(zero != zero);
  }

  void compute_scores(const float* q, int rows, int begin, int end, float* scores) const {
    const int64_t stride = params.k.stride[2];
    for (int n = begin; n < end; n += kWidth) {
      const int count = end - n < kWidth ? end - n : kWidth;
      for (int r = 0; r < rows; ++r) {
        Vec sums[kWidth] = {};
        const float* query = q + r * plan.padded_head_dim;
        int64_t d = 0;
        if (count == kWidth) {
          for (; d + kWidth <= params.head_dim; d += kWidth) {
            const Vec x = load(query + d);
#pragma GCC unroll 16
            for (int i = 0; i < kWidth; ++i) sums[i] += x * load(tile_keys + (n + i) * stride + d);
          }
        }
        for (; d < params.head_dim; d += kWidth) {
          const Vec x = load(query + d);
          for (int i = 0; i < count; ++i) sums[i] += x * load_upto(tile_keys + (n + i) * stride + d, params.head_dim - d);
        }
        store(scores + r * kKeyTile + n, sum_each(sums));
      }
    }
  }

  void accumulate(const float* weights, int rows, int begin, int end, const float* rescale, float* o) const {
    accumulate_rows<false>(weights, rows, begin, end, rescale, o);
  }

  void accumulate_seen(const float* weights, int rows, int begin, int end, const float* rescale, float* o) const {
    accumulate_rows<true>(weights, rows, begin, end, rescale, o);
  }

 private:
  template <bool kSeen>
  void accumulate_rows(const float* weights, int rows, int begin, int end, const float* rescale, float* o) const {
    for (int r = 0; r < rows; ++r) {
      const float* factor = rescale == nullptr ? nullptr : rescale + r;
      const int64_t dim = params.value_dim;
      int64_t d = 0;
      for (; d + 8 * kWidth <= dim; d += 8 * kWidth) accumulate_columns<kSeen, 8>(weights, begin, end, d, factor, o);
      for (; d + 4 * kWidth <= dim; d += 4 * kWidth) accumulate_columns<kSeen, 4>(weights, begin, end, d, factor, o);
      for (; d < dim; d += kWidth) accumulate_columns<kSeen, 1>(weights, begin, end, d, factor, o);
      weights += kKeyTile;
      o += plan.padded_value_dim;
    }
  }

  template <bool kSeen, int kVectors>
  void accumulate_columns(const float* weights, int begin, int end, int64_t d, const float* rescale, float* o) const {
    Vec sums[kVectors] = {};
    for (int n = begin; n < end; ++n) {
      if (kSeen && weights[n] == 0) continue;
      const Vec weight = broadcast(weights[n]);
      const T* value = tile_values + n * params.v.stride[2] + d;
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

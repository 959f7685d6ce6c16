// What stands between Q K^T and the softmax on some tiles: soft cap, mask and structural bounds. A masked score becomes
// -infinity by selection, whatever it was. Scores and biases are in powers of 2 from here on (natural ones times log2 e).
#pragma once

#include <cfloat>

#include "flashonnx/attention.h"
#include "kernels/sm80/plan.h"
#include "kernels/sm80/softmax.cuh"

namespace flashonnx::sm80 {


// Finite biases are bounded so that their sum with a score stays finite: a row of the most negative floats is then a row of
// equals, not an empty one.
constexpr float kLargestBias = FLT_MAX / 2;

__device__ __forceinline__ int mask_bytes(int dtype) {
  if (dtype == FLASHONNX_BOOL || dtype == FLASHONNX_INT8) return 1;
  return dtype == FLASHONNX_FLOAT16 || dtype == FLASHONNX_BFLOAT16 ? 2 : 4;
}

// The bits of one element. `offset` counts elements.
__device__ __forceinline__ uint32_t read_mask(const void* data, int64_t offset, int bytes) {
  if (bytes == 1) return static_cast<const uint8_t*>(data)[offset];
  if (bytes == 2) return static_cast<const uint16_t*>(data)[offset];
  return static_cast<const uint32_t*>(data)[offset];
}

__device__ __forceinline__ float mask_bias(uint32_t bits, int dtype) {
  float x;
  if (dtype == FLASHONNX_FLOAT32) {
    x = __uint_as_float(bits);
  } else if (dtype == FLASHONNX_BFLOAT16) {
    x = __uint_as_float(bits << 16);
  } else if (dtype == FLASHONNX_FLOAT16) {
    x = __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
  } else {
    return bits ? 0.f : -INFINITY;
  }
  const float y = x * kLog2e;
  return fabsf(x) <= FLT_MAX ? fminf(fmaxf(y, -kLargestBias), kLargestBias) : y;
}

// tanh to a relative error of a few 1e-6: the exponential form loses small arguments, the series has them.
__device__ __forceinline__ float tanh_approximate(float x) {
  const float square = x * x;
  const float series = x * fmaf(square, fmaf(square, 2.f / 15.f, -1.f / 3.f), 1.f);
  const float exponential = 1.f - __fdividef(2.f, 1.f + exp2_approximate(2.f * kLog2e * x));
  return fabsf(x) < 0.05f ? series : exponential;
}

// scores = factor * scores + bias of each key.
template <class C>
__device__ __forceinline__ void add_key_biases(const Lane& lane, float factor, const float* biases, Scores<C>& scores) {
#pragma unroll
  for (int n = 0; n < C::kKeyTiles; ++n) {
    const float2 bias = *reinterpret_cast<const float2*>(biases + 8 * n + lane.column);
#pragma unroll
    for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float b = i % 2 ? bias.y : bias.x;
        scores[r][n][i] = b == -INFINITY ? -INFINITY : fmaf(scores[r][n][i], factor, b);
      }
    }
  }
}

// scores = factor * scores + mask, read element by element. Keys at or past `limit` are not read: the bounds remove them.
template <class C>
__device__ __forceinline__ void add_mask(const Problem& p, const Lane& lane, int64_t batch, int64_t head, int first_query,
                                         int first_key, int limit, float factor, Scores<C>& scores) {
  const int bytes = mask_bytes(p.mask_dtype);
  int64_t rows[C::kRowTiles][2];
#pragma unroll
  for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int query = min(first_query + lane.warp * C::kWarpQueries + r * 16 + h * 8 + lane.row, p.q_length - 1);
      rows[r][h] = batch * p.mask.batch + head * p.mask.head + query * p.mask.row + (first_key + lane.column) * p.mask_key;
    }
  }
#pragma unroll
  for (int n = 0; n < C::kKeyTiles; ++n) {
    uint32_t bits[C::kRowTiles][4];
#pragma unroll
    for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = 8 * n + i % 2;
        const bool inside = first_key + lane.column + key < limit;
        bits[r][i] = inside ? read_mask(p.mask.data, rows[r][i / 2] + key * p.mask_key, bytes) : 0;
      }
    }
#pragma unroll
    for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float b = mask_bias(bits[r][i], p.mask_dtype);
        scores[r][n][i] = b == -INFINITY ? -INFINITY : fmaf(scores[r][n][i], factor, b);
      }
    }
  }
}

// Scale, soft cap and mask. After it the scores' factor is 1.
template <class C>
__device__ __forceinline__ void general_scores(const Problem& p, const Plan& plan, const Lane& lane, int64_t batch,
                                               int64_t head, int first_query, int first_key, int limit,
                                               const float* biases, Scores<C>& scores) {
  float factor = plan.factor;
  if (p.softcap > 0.f) {
    factor = 1.f;
#pragma unroll
    for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
      for (int n = 0; n < C::kKeyTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[r][n][i] = plan.cap_out * tanh_approximate(plan.cap_in * scores[r][n][i]);
      }
    }
  }
  if (plan.mask_per_key) {
    add_key_biases<C>(lane, factor, biases, scores);
  } else if (p.mask.data) {
    add_mask<C>(p, lane, batch, head, first_query, first_key, limit, factor, scores);
  } else {
#pragma unroll
    for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
      for (int n = 0; n < C::kKeyTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[r][n][i] *= factor;
      }
    }
  }
}

template <class C>
__device__ __forceinline__ void apply_bounds(const KeyRange& range, const Lane& lane, int first_query, int first_key,
                                             Scores<C>& scores) {
  const int query = first_query + lane.warp * C::kWarpQueries + lane.row;
#pragma unroll
  for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int lower = range.lower(query + r * 16 + h * 8);
      const unsigned seen = max(range.upper(query + r * 16 + h * 8) - lower, 0);
      const int first = first_key + lane.column - lower;
#pragma unroll
      for (int n = 0; n < C::kKeyTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (static_cast<unsigned>(first + 8 * n + e) >= seen) scores[r][n][2 * h + e] = -INFINITY;
        }
      }
    }
  }
}

}  // namespace flashonnx::sm80

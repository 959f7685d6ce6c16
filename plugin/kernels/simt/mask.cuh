// Soft cap, mask and structural bounds of a lane's scores. A masked score becomes -infinity by
// selection, whatever it was.
#pragma once

#include <cfloat>
#include <cmath>

#include "flashonnx/attention.h"
#include "kernels/simt/device.cuh"
#include "kernels/simt/lane.cuh"
#include "kernels/simt/problem.h"

namespace flashonnx::simt {

template <class M>
__device__ __forceinline__ float bias_of(M x) {
  if constexpr (std::is_integral_v<M>) {
    return x ? 0.f : -INFINITY;
  } else {
    return to_float(x);
  }
}

// A finite sum that overflows stays finite: a row of the most negative floats is a row of equals,
// not an empty one.
__device__ __forceinline__ float add_bias(float score, float bias) {
  const float sum = score + bias;
  if (bias == -INFINITY) return -INFINITY;
  return sum < -FLT_MAX ? -FLT_MAX : sum;
}

// Adds a mask of element type M to the lane's scores in `probabilities`, its own places only.
template <class M, class C>
__device__ __forceinline__ void add_mask(const Problem& p, const Lane<C>& lane, int64_t batch,
                                         int64_t head, int first_query, int first_key, int limit,
                                         float* probabilities) {
  const int key = first_key + lane.key(0);
  const M* base = static_cast<const M*>(p.mask.data) + batch * p.mask.batch + head * p.mask.head +
                  key * p.mask_key;
#pragma unroll 2
  for (int i = 0; i < C::kThreadRows; ++i) {
    const M* row = base + min(first_query + lane.query(i), p.q_length - 1) * p.mask.row;
    float bias[C::kThreadKeys];
#pragma unroll
    for (int j = 0; j < C::kThreadKeys;
         ++j) {  // keys past the limit are outside the mask; the bounds remove them
      bias[j] = key + Lane<C>::key_step(j) < limit ? bias_of(row[Lane<C>::key_step(j) * p.mask_key])
                                                   : 0.f;
    }
    float* scores = probabilities + lane.query(i) * C::kBlockKeys;
#pragma unroll
    for (int j = 0; j < C::kThreadKeys; ++j) {
      float& score = scores[probability_column<C>(lane.row, lane.key(j))];
      score = add_bias(score, bias[j]);
    }
  }
}

// Soft cap and mask. They go through the lane's own places in the block's P: loops that index
// shared memory need not be unrolled, which keeps rare work out of the registers. No barrier:
// nobody else reads these places before the next one.
template <class C>
__device__ __forceinline__ void cap_and_mask(const Problem& p, const Lane<C>& lane, int64_t batch,
                                             int64_t head, int first_query, int first_key,
                                             int limit, float* probabilities,
                                             float (&scores)[C::kThreadRows][C::kThreadKeys]) {
  store_scores<C>(lane, scores, probabilities);
  if (p.softcap > 0.f) {
#pragma unroll 1
    for (int n = 0; n < C::kThreadRows * C::kThreadKeys; ++n) {
      const int offset =
          probability_offset<C>(lane.query(n / C::kThreadKeys), lane.key(n % C::kThreadKeys));
      probabilities[offset] = p.softcap * tanhf(probabilities[offset] / p.softcap);
    }
  }
  switch (p.mask.data ? p.mask_dtype : FLASHONNX_NONE) {
    case FLASHONNX_BOOL:
    case FLASHONNX_INT8:
      add_mask<int8_t>(p, lane, batch, head, first_query, first_key, limit, probabilities);
      break;
    case FLASHONNX_INT32:
      add_mask<int32_t>(p, lane, batch, head, first_query, first_key, limit, probabilities);
      break;
    case FLASHONNX_FLOAT16:
      add_mask<__half>(p, lane, batch, head, first_query, first_key, limit, probabilities);
      break;
    case FLASHONNX_BFLOAT16:
      add_mask<__nv_bfloat16>(p, lane, batch, head, first_query, first_key, limit, probabilities);
      break;
    case FLASHONNX_FLOAT32:
      add_mask<float>(p, lane, batch, head, first_query, first_key, limit, probabilities);
      break;
  }
#pragma unroll
  for (int i = 0; i < C::kThreadRows; ++i) {
#pragma unroll
    for (int j = 0; j < C::kThreadKeys; ++j) {
      scores[i][j] = probabilities[probability_offset<C>(lane.query(i), lane.key(j))];
    }
  }
}

template <class C>
__device__ __forceinline__ void apply_bounds(const KeyRange& range, const Lane<C>& lane,
                                             int first_query, int first_key,
                                             float (&scores)[C::kThreadRows][C::kThreadKeys]) {
  const int query = first_query + lane.query(0);
  const int first = query + range.first - first_key, last = query + range.last - first_key,
            limit = range.limit - first_key;
#pragma unroll
  for (int i = 0; i < C::kThreadRows;
       ++i) {  // as range.lower and upper, counted from the tile's first key
    const int lower = first + C::kLaneRows * i, upper = min(last + C::kLaneRows * i, limit);
#pragma unroll
    for (int j = 0; j < C::kThreadKeys; ++j) {
      if (lane.key(j) < lower || lane.key(j) >= upper) scores[i][j] = -INFINITY;
    }
  }
}

// Keys without a page are masked.
template <class C>
__device__ __forceinline__ void mask_absent(const Pages& pages, const Lane<C>& lane, int64_t batch,
                                            int first_key, int limit,
                                            float (&scores)[C::kThreadRows][C::kThreadKeys]) {
#pragma unroll
  for (int j = 0; j < C::kThreadKeys; ++j) {
    const int key = first_key + lane.key(j);
    if (key >= limit || slot_of(pages, batch, key).page >= 0) continue;
#pragma unroll
    for (int i = 0; i < C::kThreadRows; ++i) scores[i][j] = -INFINITY;
  }
}

}  // namespace flashonnx::simt

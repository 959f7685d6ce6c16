// What stands between K Q^T and the softmax on some tiles: soft cap, mask, pages that are not there
// and structural bounds. Scores and biases are in powers of 2 from here on. What is masked becomes
// -infinity by selection, whatever the score was.
#pragma once

#include "kernels/common/bias.cuh"
#include "kernels/decode/softmax.cuh"

namespace flashonnx::decode {

// The packed rows of a tile: row r is query r / group of query head r % group.
struct Rows {
  int first, count;  // of the batch entry's packed rows; count <= kRows
  int batch, kv_head;

  __device__ __forceinline__ int query(const Decode& d, int row) const {
    return static_cast<int>(d.group.quotient(first + row));
  }
  __device__ __forceinline__ int head(const Decode& d, int row) const {
    const int packed = first + row;
    return kv_head * static_cast<int>(d.group.divisor) + packed -
           static_cast<int>(d.group.quotient(packed) * d.group.divisor);
  }
};

template <class C>
__device__ __forceinline__ void cap_scores(const Decode& d, Scores<C>& scores) {
#pragma unroll
  for (int n = 0; n < C::kRowTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      scores[n][i] = d.cap_out * tanh_approximate(d.cap_in * scores[n][i]);
  }
}

// scores = factor * scores + bias(mask).
template <class C>
__device__ __forceinline__ void add_mask(const Problem& p, const Decode& d, const Lane& lane,
                                         const Rows& rows, int first_key, int limit, float factor,
                                         Scores<C>& scores) {
  const int key = first_key + lane.column;
#pragma unroll
  for (int n = 0; n < C::kRowTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = min(n * 8 + lane.quad * 2 + e, rows.count - 1);
      const char* const from = static_cast<const char*>(p.mask.data) +
                               (rows.batch * p.mask.batch + rows.head(d, row) * p.mask.head +
                                rows.query(d, row) * p.mask.row + key * p.mask_key) *
                                   d.mask_bytes;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float& score = scores[n][2 * h + e];
        uint32_t bits = 0;
        if (key + 8 * h < limit)
          bits = mask_bits(from + 8 * h * p.mask_key * d.mask_bytes, d.mask_bytes);
        const float bias = mask_bias(bits, p.mask_dtype);
        score = bias == -INFINITY ? -INFINITY : fmaf(score, factor, bias);
      }
    }
  }
}

template <class T, class C>
__device__ __forceinline__ void mask_missing_pages(const Loader<T, C>& loader, const Lane& lane,
                                                   int first_key, Scores<C>& scores) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (loader.exists(first_key + lane.column + 8 * h)) continue;
#pragma unroll
    for (int n = 0; n < C::kRowTiles; ++n) scores[n][2 * h] = scores[n][2 * h + 1] = -INFINITY;
  }
}

template <class C>
__device__ __forceinline__ void apply_bounds(const Decode& d, const KeyRange& range,
                                             const Lane& lane, const Rows& rows, int first_key,
                                             Scores<C>& scores) {
  const int key = first_key + lane.column;
#pragma unroll
  for (int n = 0; n < C::kRowTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int query = rows.query(d, n * 8 + lane.quad * 2 + e);
      const int lower = range.lower(query), upper = range.upper(query);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (key + 8 * h < lower || key + 8 * h >= upper) scores[n][2 * h + e] = -INFINITY;
      }
    }
  }
}

}  // namespace flashonnx::decode

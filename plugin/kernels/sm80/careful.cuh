// Masked slots of K and V may hold anything. Keys at or past the length are zeros in shared memory,
// and bounds are selected, but a mask's -infinity is added to scores that may be no numbers, and P
// V multiplies masked slots of V by zero, which makes a NaN of an infinity or a NaN. So a block
// whose output holds a NaN walks over its keys once more, carefully: scores are selected too, and
// elements of V that are not finite are taken out of the product and added to the rows that see
// them.
#pragma once

#include "kernels/sm80/mask.cuh"

namespace flashonnx::sm80 {

// Whether an element of a pair is infinite or NaN; such ones become 0.
template <class T>
__device__ __forceinline__ bool take_out_nonfinite(uint32_t& pair) {
  constexpr uint32_t kExponent = std::is_same_v<T, __half> ? 0x7c00u : 0x7f80u;
  const bool low = (pair & kExponent) == kExponent;
  const bool high = (pair >> 16 & kExponent) == kExponent;
  pair = (low ? 0 : pair & 0xffffu) | (high ? 0 : pair & 0xffff0000u);
  return low || high;
}

// Cleans a tile of V. Bit i of `flags` says that key i had such an element. Barriers before and
// after are the caller's.
template <class T, class C>
__device__ __forceinline__ void clean_values(uint32_t shared, uint32_t* flags) {
  using L = KeyLayout<C>;
  const int key = threadIdx.x;
  static_assert(C::kKeys == 32);
  if (key >= C::kKeys) return;  // all but the first warp
  bool flagged = false;
#pragma unroll 1
  for (int chunk = 0; chunk < L::kChunks; ++chunk) {
    uint4 x = load_shared(shared + L::offset(key, chunk));
    const bool any = take_out_nonfinite<T>(x.x) | take_out_nonfinite<T>(x.y) |
                     take_out_nonfinite<T>(x.z) | take_out_nonfinite<T>(x.w);
    if (any) store_shared(shared + L::offset(key, chunk), x);
    flagged |= any;
  }
  const uint32_t keys = __ballot_sync(0xffffffffu, flagged);
  if (key == 0) *flags = keys;
}

// Adds what `clean_values` took out to the rows that see it. The scores are not yet exponentiated,
// the maxima are raised. `row_of(key)` is the key's row of V in global memory.
template <class T, class C, class RowOf>
__device__ __forceinline__ void add_nonfinite(const Lane& lane, const Scores<C>& scores,
                                              float factor, const uint32_t* flags, RowOf row_of,
                                              int dim, RowState<C>& state) {
#pragma unroll 1
  for (uint32_t left = *flags; left != 0; left &= left - 1) {
    const int key = __ffs(left) - 1;
    const T* const row = row_of(key);
    const int source =
        (lane.lane & ~3) | key / C::kRun;  // the thread that has the key's scores of these rows
#pragma unroll
    for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float score = -INFINITY;
#pragma unroll
        for (int i = 0; i < C::kRun; ++i) {
          if (key % C::kRun == i) score = scores.at[r][i / 2][2 * h + i % 2];
        }
        score = __shfl_sync(0xffffffffu, score, source);
        const float p = exp2_approximate(fmaf(score, factor, -state.maximum[r][h]));
#pragma unroll
        for (int d = 0; d < C::kDimTiles; ++d) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int feature = 8 * d + 2 * lane.quad + e;
            const float x = feature < dim ? to_float(row[feature]) : 0.f;
            const bool add = score != -INFINITY && !(fabsf(x) <= FLT_MAX);
            if (add) state.output[r][d][2 * h + e] += p * x;
          }
        }
      }
    }
  }
}

// Whether the output holds a NaN (or an infinity: it is zero times the elements that is looked at).
template <class C>
__device__ __forceinline__ bool holds_nan(const RowState<C>& state) {
  float sum = 0.f;
#pragma unroll
  for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
    for (int d = 0; d < C::kDimTiles; ++d) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sum = fmaf(state.output[r][d][i], 0.f, sum);
    }
  }
  return sum != 0.f;
}

}  // namespace flashonnx::sm80

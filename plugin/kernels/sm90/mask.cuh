// What stands between Q K^T and the softmax on some tiles: soft cap, mask and structural bounds.
//
// The bounds select -infinity, whatever a score was. A mask's -infinity is added, which costs less
// and comes to the same unless the masked score is infinite or NaN: careful.cuh is about that.
#pragma once

#include "kernels/common/bias.cuh"
#include "kernels/sm90/softmax.cuh"

namespace flashonnx::sm90 {

// scores = factor * scores + bias of each key.
template <class C>
__device__ __forceinline__ void add_key_biases(const Lane& lane, float factor, const float* biases,
                                               float (&scores)[C::kScores]) {
#pragma unroll
  for (int n = 0; n < C::kScores / 4; ++n) {
    const float2 bias = *reinterpret_cast<const float2*>(biases + 8 * n + 2 * lane.quad);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      scores[4 * n + 2 * h] = fmaf(scores[4 * n + 2 * h], factor, bias.x);
      scores[4 * n + 2 * h + 1] = fmaf(scores[4 * n + 2 * h + 1], factor, bias.y);
    }
  }
}

// scores = factor * scores + mask. `row` points at the thread's first row and key; rows beyond
// `last_row` repeat it; `keys` of the tile's from the thread's first on are inside the mask, the
// bounds remove the others. `pairs`: two neighbouring keys can be read at once.
template <class M, class C>
__device__ __forceinline__ void add_mask(const M* row, int64_t row_stride, int last_row,
                                         int64_t key_stride, int keys, bool pairs, float factor,
                                         float (&scores)[C::kScores]) {
  struct alignas(2 * sizeof(M)) Pair {
    M at[2];
  };
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const M* from = row + min(8 * h, last_row) * row_stride;
#pragma unroll
    for (int n = 0; n < C::kScores / 4; ++n) {
      Pair pair;
      if (pairs && 8 * n + 2 <= keys) {
        pair = *reinterpret_cast<const Pair*>(from + 8 * n);
      } else {
#pragma unroll
        for (int e = 0; e < 2; ++e)
          pair.at[e] = 8 * n + e < keys ? from[(8 * n + e) * key_stride] : M{};
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& score = scores[4 * n + 2 * h + e];
        score = fmaf(score, factor, mask_bias(pair.at[e]));
      }
    }
  }
}

// Calls visit(pointer) with the mask's data as what they are.
template <class Visit>
__device__ __forceinline__ void visit_mask(const Problem& p, Visit visit) {
  switch (p.mask_dtype) {
    case FLASHONNX_FLOAT32:
      return visit(static_cast<const float*>(p.mask.data));
    case FLASHONNX_FLOAT16:
      return visit(static_cast<const __half*>(p.mask.data));
    case FLASHONNX_BFLOAT16:
      return visit(static_cast<const __nv_bfloat16*>(p.mask.data));
    case FLASHONNX_INT32:
      return visit(static_cast<const int32_t*>(p.mask.data));
    default:
      return visit(static_cast<const int8_t*>(p.mask.data));
  }
}

// Scale, soft cap and mask. After it the scores' factor is 1. `biases`: of the tile's keys, or
// null.
template <class C>
__device__ __forceinline__ void general_scores(const Problem& p, const Plan& plan, const Lane& lane,
                                               const Work& work, int first_key, int limit,
                                               const float* biases, float (&scores)[C::kScores]) {
  float factor = plan.factor;
  if (p.softcap > 0.f) {
    factor = 1.f;
#pragma unroll
    for (int i = 0; i < C::kScores; ++i)
      scores[i] = plan.cap_out * tanh_approximate(plan.cap_in * scores[i]);
  }
  if (biases) {
    add_key_biases<C>(lane, factor, biases, scores);
  } else if (p.mask.data && !plan.mask_per_key) {
    const int query = min(work.first_query + lane.first_row(), p.q_length - 1);
    const int key = first_key + 2 * lane.quad;
    const int64_t at =
        work.batch * p.mask.batch + work.head * p.mask.head + query * p.mask.row + key * p.mask_key;
    visit_mask(p, [&](auto* mask) {
      add_mask<std::remove_const_t<std::remove_pointer_t<decltype(mask)>>, C>(
          mask + at, p.mask.row, p.q_length - 1 - query, p.mask_key, limit - key, plan.mask_vectors,
          factor, scores);
    });
  } else {
#pragma unroll
    for (int i = 0; i < C::kScores; ++i) scores[i] *= factor;
  }
}

template <class C>
__device__ __forceinline__ void apply_bounds(const KeyRange& range, const Lane& lane,
                                             int first_query, int first_key,
                                             float (&scores)[C::kScores]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int query = first_query + lane.first_row() + 8 * h;
    const int lower = range.lower(query);
    const unsigned seen = max(range.upper(query) - lower, 0);
    const int first = first_key + 2 * lane.quad - lower;
#pragma unroll
    for (int n = 0; n < C::kScores / 4; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (static_cast<unsigned>(first + 8 * n + e) >= seen) scores[4 * n + 2 * h + e] = -INFINITY;
      }
    }
  }
}

}  // namespace flashonnx::sm90

// Soft cap and mask, sm80's but for the cap's tanh, which is exact to float32 here.
#pragma once

#include "kernels/sm80/mask.cuh"
#include "kernels/tf32/load.cuh"

namespace flashonnx::tf32 {

// tanh within 3 units in the last place. The polynomial is the best one of its degree below 0.55;
// beyond, 1 is too large for the exponential form to lose much.
__device__ __forceinline__ float tanh_exact(float x) {
  const float square = x * x;
  float y = fmaf(square, -0.00589395f, 0.02079462f);
  y = fmaf(square, y, -0.05378329f);
  y = fmaf(square, y, 0.13331915f);
  y = fmaf(square, y, -0.33333298f);
  const float exponential = 1.f - __fdividef(2.f, 1.f + exp2_approximate(2.f * kLog2e * x));
  return fabsf(x) < 0.55f ? fmaf(x * square, y, x) : exponential;
}

// Scale, soft cap and mask. After it the scores' factor is 1.
template <class C, bool kCareful>
__device__ __forceinline__ void general_scores(const Problem& p, const Plan& plan, const Lane& lane,
                                               int64_t batch, int64_t head, int first_query,
                                               int first_key, int limit, const float* biases,
                                               Scores<C>& scores) {
  float factor = plan.factor;
  if (p.softcap > 0.f) {
    factor = 1.f;
#pragma unroll
    for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
      for (int n = 0; n < C::kKeyTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          scores.at[r][n][i] = plan.cap_out * tanh_exact(plan.cap_in * scores.at[r][n][i]);
      }
    }
  }
  if (plan.mask_per_key) {
    sm80::add_key_biases<C, kCareful>(lane, factor, biases, scores);
  } else if (p.mask.data) {
    sm80::add_query_mask<__half, C, kCareful>(p, plan, lane, batch, head, first_query, first_key,
                                              limit, factor, scores);
  } else {
#pragma unroll
    for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
      for (int n = 0; n < C::kKeyTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores.at[r][n][i] *= factor;
      }
    }
  }
}

}  // namespace flashonnx::tf32

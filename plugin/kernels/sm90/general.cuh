// What the general kernel does to scores: soft cap, any scale, and masks of every kind.
#pragma once

#include "kernels/sm90/mask.cuh"

namespace flashonnx::sm90 {

// What a step has to look at: everything; a mask's biases alone, of keys or, in the general kernel,
// of Q's type with a row per query; the bits of a mask with a row per query alone; no bounds, and
// in the plain kernel no mask either.
enum class Look { kBounds, kBiases, kBits, kNone };

template <class T, class C>
struct General {
  const Problem& p;
  const Plan& plan;

  // What its scores are multiplied by to be powers of 2.
  template <Look kLook>
  __device__ __forceinline__ float unit() const {
    return kLook != Look::kBiases && bare_products() ? plan.factor : kLog2e;
  }
  // Whether a mask of Q's type with a row per query is all that it has to see to.
  __device__ __forceinline__ bool has_row_biases() const {
    return has_rows() && plan.mask_bytes != 1 && !(p.softcap > 0.f);
  }

  // Scale, soft cap and mask: `tile` of one with a row per query, else `key_biases`. `pairs`: what
  // was read early.
  template <Look kLook>
  __device__ __forceinline__ void apply(const Lane& lane, uint32_t tile, const float* key_biases,
                                        const uint32_t (&pairs)[C::kScores / 2],
                                        float (&scores)[C::kScores]) const {
    const bool capped = kLook != Look::kBiases && p.softcap > 0.f;
    if (capped) cap_scores<C>(plan.cap_in, p.softcap, scores);
    const float scale = capped ? 1.f : p.scale;
    const auto add = [&](int i, uint32_t pair) { add_biases<T>(scale, pair, scores + 2 * i); };
    const auto select = [&](int i, uint32_t pair) { select_by_bytes(pair, scores + 2 * i); };
    const auto use = [&](const auto& read, const auto& apply) {
      if constexpr (kReadsEarly) {
#pragma unroll
        for (int i = 0; i < C::kScores / 2; ++i) apply(i, pairs[i]);
      } else {
        read(apply);
      }
    };
    const auto biases = [&](const auto& apply) { read_biases<C>(lane, tile, apply); };
    const auto bytes = [&](const auto& apply) { read_bytes<C>(lane, tile, apply); };
    if (kLook == Look::kBiases) return use(biases, add);
    if (plan.mask_per_key) {
      add_key_biases<C>(lane, scale, kLn2, key_biases, scores);
    } else if (p.mask.data && plan.mask_bytes != 1) {
      use(biases, add);
    } else {
      if (!(scale > 0.f)) {
#pragma unroll
        for (int i = 0; i < C::kScores; ++i) scores[i] *= scale;
      }
      if (p.mask.data) use(bytes, select);
    }
  }

  // Reads a mask's part for a tile of keys that has come, if there are registers for it: while
  // products are made.
  template <Look kLook>
  __device__ __forceinline__ void read_early(const Lane& lane, uint32_t tile,
                                             uint32_t (&pairs)[C::kScores / 2]) const {
    if constexpr (kReadsEarly) {
      const auto keep = [&](int i, uint32_t pair) { pairs[i] = pair; };
      if (kLook == Look::kBiases || (has_rows() && plan.mask_bytes != 1)) {
        read_biases<C>(lane, tile, keep);
      } else if (has_rows()) {
        read_bytes<C>(lane, tile, keep);
      }
    }
  }

  // As maxima are kept in other kernels.
  __device__ __forceinline__ RowState in_powers_of_2(RowState state) const {
#pragma unroll
    for (int h = 0; C::kGeneral && h < 2; ++h)
      state.maximum[h] = fmaxf(unit<Look::kBounds>() * state.maximum[h], -FLT_MAX);
    // As products biases were bounded before they were powers of 2.
    const float least = -0.99f * kLargestBias * fminf(plan.factor, 1.f);
#pragma unroll
    for (int h = 0; C::kBiasProduct && h < 2; ++h)
      if (state.maximum[h] <= least) state.maximum[h] = -kLargestBias;
    return state;
  }

 private:
  static constexpr bool kReadsEarly = C::kGeneral && C::kGroups == 2;

  // Whether products stay as they are, as there is nothing to add to them.
  __device__ __forceinline__ bool bare_products() const {
    const bool biases = p.mask.data && (plan.mask_per_key || plan.mask_bytes != 1);
    return !biases && !(p.softcap > 0.f) && p.scale > 0.f;
  }
  __device__ __forceinline__ bool has_rows() const { return p.mask.data && !plan.mask_per_key; }
};

}  // namespace flashonnx::sm90

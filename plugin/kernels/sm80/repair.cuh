// Rows that came out as NaN, once more. The products multiply masked slots of V by zero, and zero
// times an infinity or a NaN is a NaN; a mask's -infinity is added to scores that may be no
// numbers. So a row that is NaN and may have a masked slot is computed again, key by key, without
// touching masked ones. NaNs that belong in the result stay. Keys at or past the length are zeros
// in shared memory and need none of this.
#pragma once

#include "kernels/sm80/epilogue.cuh"

namespace flashonnx::sm80 {

// One row by one warp: lanes share out 32 keys at a time for the scores, then features for P V.
// False if it has no key.
template <class T, class C>
__device__ __noinline__ bool repair_row(const Problem& p, const Plan& plan, int lane, int64_t batch,
                                        int64_t head, int query) {
  const KeyRange range = key_range(p, key_length_of(p, batch));
  const int64_t kv_head = head / p.group;
  const T* q =
      static_cast<const T*>(p.q.data) + batch * p.q.batch + head * p.q.head + query * p.q.row;
  const T* k = static_cast<const T*>(p.k.data) + batch * p.k.batch + kv_head * p.k.head;
  const T* v = static_cast<const T*>(p.v.data) + batch * p.v.batch + kv_head * p.v.head;
  float maximum = -FLT_MAX, sum = 0.f;
  float output[C::kDim / 32] = {};
  const int end = range.upper(query);
  for (int first = range.lower(query); first < end && sum == sum; first += 32) {
    const int key = first + lane;
    bool seen = key < end;
    float score = -INFINITY;
    if (seen) {
      float bias = 0.f;
      if (p.mask.data) {
        bias = mask_bias(mask_bits(mask_element(p, plan, batch, head, query, key), plan.mask_bytes),
                         p.mask_dtype);
      }
      float product = 0.f;
      for (int d = 0; d < p.head_dim; ++d)
        product = fmaf(to_float(q[d]), to_float(k[key * p.k.row + d]), product);
      score = p.softcap > 0.f ? plan.cap_out * tanh_approximate(plan.cap_in * product)
                              : plan.factor * product;
      seen = bias != -INFINITY;
      score = seen ? score + bias : -INFINITY;
    }
    float top = quad_maximum(score);
    for (int distance = 4; distance < 32; distance *= 2)
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, distance));
    const float next = fmaxf(maximum, top);
    const float keep = exp2_approximate(maximum - next);
    const float weight = seen ? exp2_approximate(score - next) : 0.f;
    float weights = quad_sum(weight);
    for (int distance = 4; distance < 32; distance *= 2)
      weights += __shfl_xor_sync(0xffffffffu, weights, distance);
    maximum = next;
    sum = fmaf(sum, keep, weights);
#pragma unroll
    for (int i = 0; i < C::kDim / 32; ++i) output[i] *= keep;
    for (uint32_t left = __ballot_sync(0xffffffffu, seen); left != 0; left &= left - 1) {
      const int source = __ffs(left) - 1;
      const float w = __shfl_sync(0xffffffffu, weight, source);
#pragma unroll
      for (int i = 0; i < C::kDim / 32; ++i) {
        const int d = lane + 32 * i;
        if (d < p.value_dim)
          output[i] = fmaf(w, to_float(v[(first + source) * p.v.row + d]), output[i]);
      }
    }
  }
  if (p.lse.data && lane == 0) {
    static_cast<float*>(p.lse.data)[batch * p.lse.batch + head * p.lse.head + query * p.lse.row] =
        natural_lse(maximum, sum);
  }
  const float scale = normaliser(p, head, maximum, sum);
#pragma unroll
  for (int i = 0; i < C::kDim / 32; ++i) {
    const int d = lane + 32 * i;
    const int64_t at = batch * p.o.batch + head * p.o.head + query * p.o.row + d;
    if (d < p.value_dim) store_element(p, at, output[i] * scale);
  }
  return sum != 0.f;
}

}  // namespace flashonnx::sm80

// Masked slots of K and V may hold anything. Keys outside the tensors are zeros in shared memory
// and bounds are selected, but a mask's -infinity is added to scores that may be no numbers, and P
// V multiplies masked slots of V by zero, which makes a NaN of an infinity or a NaN. So a warp
// whose output holds a NaN computes its rows once more, one at a time and from global memory,
// leaving out what is masked. That is slow, and as rare as such slots are.
#pragma once

#include "kernels/common/finish.cuh"
#include "kernels/sm90/projection.cuh"
#include "kernels/sm90/schedule.h"
#include "kernels/sm90/softmax.cuh"

namespace flashonnx::sm90 {

// Whether the output holds a NaN (or an infinity: it is zero times the elements that is looked at).
template <class C>
__device__ __forceinline__ bool holds_nan(const float (&output)[C::kOutputs]) {
  float sums[4] = {};
#pragma unroll
  for (int i = 0; i < C::kOutputs; ++i) sums[i % 4] = fmaf(output[i], 0.f, sums[i % 4]);
  return (sums[0] + sums[1]) + (sums[2] + sums[3]) != 0.f;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) x += __shfl_xor_sync(0xffffffffu, x, i);
  return x;
}

// Features lane, lane + 32, ... of a row, zeros from `dim` on.
template <class T, class C>
__device__ __forceinline__ void load_row(const T* from, int dim, int lane,
                                         float (&x)[C::kDim / 32]) {
#pragma unroll
  for (int i = 0; i < C::kDim / 32; ++i)
    x[i] = 32 * i + lane < dim ? to_float(from[32 * i + lane]) : 0.f;
}

// Of a key, from a mask that is there.
__device__ __forceinline__ float bias_of_key(const Problem& p, const Plan& plan, const Work& work,
                                             int query, int key) {
  const char* at = mask_element(p, plan, work.batch, work.head, query, key);
  return mask_bias(mask_bits(at, plan.mask_bytes), p.mask_dtype);
}

// The first key from `key` on that the mask does not hide: a warp looks at 32 at a time, as a row
// may see few or none.
__device__ __forceinline__ int next_seen(const Problem& p, const Plan& plan, const Work& work,
                                         int query, int key, int end, int lane) {
#pragma unroll 1
  for (; key < end; key += 32) {
    const bool is_seen =
        key + lane < end && bias_of_key(p, plan, work, query, key + lane) != -INFINITY;
    const uint32_t seen = __ballot_sync(0xffffffffu, is_seen);
    if (seen != 0) return key + __ffs(seen) - 1;
  }
  return end;
}

// A row of the output, from all lanes: softmax over the keys that it sees.
template <class T, class C>
__device__ __forceinline__ void attend_row(const Problem& p, const Plan& plan, const Work& work,
                                           const Sequence& sequence, const KeyRange& range,
                                           int query, int lane, float (&output)[C::kDim / 32],
                                           float& maximum, float& sum) {
  float q[C::kDim / 32];
  load_row<T, C>(static_cast<const T*>(p.q.data) + work.batch * p.q.batch + work.head * p.q.head +
                     (sequence.first_query + query) * p.q.row,
                 p.head_dim, lane, q);
  if constexpr (C::kBiased) add_query_bias<T, C>(p, work.head, lane, q);
  const T* const k = static_cast<const T*>(p.k.data) + work.batch * p.k.batch +
                     work.kv_head * p.k.head + sequence.first_key * p.k.row;
  const T* const v = static_cast<const T*>(p.v.data) + work.batch * p.v.batch +
                     work.kv_head * p.v.head + sequence.first_key * p.v.row;
  maximum = -FLT_MAX, sum = 0.f;
#pragma unroll
  for (int i = 0; i < C::kDim / 32; ++i) output[i] = 0.f;
#pragma unroll 1
  for (int key = range.lower(query); key < range.upper(query); ++key) {
    if constexpr (C::kWeights) {
      key = next_seen(p, plan, work, query, key, range.upper(query), lane);
      if (key == range.upper(query)) break;
    }
    float bias = 0.f;
    if (p.mask.data) {
      bias = bias_of_key(p, plan, work, query, key);
      if (bias == -INFINITY) continue;
    }
    Slot slot = {0, key};
    if (C::kGathered && p.pages.table) slot = slot_of(p.pages, work.batch, key);
    if (slot.page < 0) continue;
    float row[C::kDim / 32], score = 0.f;
    load_row<T, C>(k + slot.page * p.pages.k + slot.slot * p.k.row, p.head_dim, lane, row);
#pragma unroll
    for (int i = 0; i < C::kDim / 32; ++i) score = fmaf(q[i], row[i], score);
    score = warp_sum(score);
    score = p.softcap > 0.f ? plan.cap_out * tanh_approximate(plan.cap_in * score)
                            : plan.factor * score;
    score += bias;
    if (score == -INFINITY) continue;
    const float next = fmaxf(maximum, score);
    const float keep = exp2_approximate(maximum - next), weight = exp2_approximate(score - next);
    maximum = next;
    sum = fmaf(sum, keep, weight);
    load_row<T, C>(v + slot.page * p.pages.v + slot.slot * p.v.row, p.value_dim, lane, row);
#pragma unroll
    for (int i = 0; i < C::kDim / 32; ++i) output[i] = fmaf(output[i], keep, weight * row[i]);
  }
  if constexpr (C::kBiased) add_value_bias<T, C>(p, work.kv_head, lane, sum, output);
}

// The mean of V over the keys below the length: what a row without keys becomes if asked for.
template <class T, class C>
__device__ __forceinline__ void mean_of_values(const Problem& p, const Work& work, int lane,
                                               float (&output)[C::kDim / 32]) {
  const T* const v =
      static_cast<const T*>(p.v.data) + work.batch * p.v.batch + work.kv_head * p.v.head;
  const int length = key_length_of(p, work.batch);
#pragma unroll
  for (int i = 0; i < C::kDim / 32; ++i) output[i] = 0.f;
#pragma unroll 1
  for (int key = 0; key < length; ++key) {
    float row[C::kDim / 32];
    load_row<T, C>(v + key * p.v.row, p.value_dim, lane, row);
#pragma unroll
    for (int i = 0; i < C::kDim / 32; ++i) output[i] += row[i];
  }
#pragma unroll
  for (int i = 0; i < C::kDim / 32; ++i) output[i] = __fdividef(output[i], max(length, 1));
  if constexpr (C::kBiased)
    if (length > 0) add_value_bias<T, C>(p, work.kv_head, lane, 1.f, output);
}

__device__ __forceinline__ void store_lse(const Problem& p, const Work& work, int query, float x) {
  if (!p.lse.data) return;
  static_cast<float*>(
      p.lse.data)[work.batch * p.lse.batch + work.head * p.lse.head + query * p.lse.row] = x;
}

// Stores a row that all lanes hold.
template <class C>
__device__ __forceinline__ void store_row(const Problem& p, const Work& work, int query, int lane,
                                          float scale, const float (&output)[C::kDim / 32]) {
  const int64_t at = work.batch * p.o.batch + work.head * p.o.head + query * p.o.row;
#pragma unroll
  for (int i = 0; i < C::kDim / 32; ++i) {
    if (32 * i + lane < p.value_dim) store_element(p, at + 32 * i + lane, scale * output[i]);
  }
}

// All rows of the warp, everything that is written of them.
template <class T, class C>
__device__ __forceinline__ void attend_carefully(const Problem& p, const Plan& plan,
                                                 const ItemOf<C>& item, int first_query, int lane) {
  const Work& work = item.work;
  Sequence sequence = {0, 0, p.q_length, 0, p.q_length};
  if constexpr (C::kGathered) {
    sequence = sequence_of(p, work.batch);
  } else {
    sequence.keys = key_length_of(p, work.batch);
  }
  const KeyRange range = key_range(p, sequence.length, sequence.keys);
#pragma unroll 1
  for (int query = first_query; query < min(first_query + 16, sequence.queries); ++query) {
    float output[C::kDim / 32], maximum, sum;
    attend_row<T, C>(p, plan, work, sequence, range, query, lane, output, maximum, sum);
    float scale = normaliser(p, work.head, maximum, sum);
    if (sum == 0.f && p.empty_row_mean) {
      mean_of_values<T, C>(p, work, lane, output);
      scale = 1.f;
    }
    const int token = sequence.first_query + query;
    store_row<C>(p, work, token, lane, scale, output);
    if (lane == 0) store_lse(p, work, token, natural_lse(p, maximum, sum));
  }
}

}  // namespace flashonnx::sm90

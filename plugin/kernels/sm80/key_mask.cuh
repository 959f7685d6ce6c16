// Masks that do not depend on the query, in an instance of their own.
#pragma once

#include "kernels/sm80/block.cuh"
#include "kernels/sm80/mask.cuh"

namespace flashonnx::sm80 {

// The mask is read once per key, a tile ahead, and what it adds to scores stands in shared memory,
// for two tiles, each run's biases with a bound behind them. Every thread reads an element, two of
// them the same where there are fewer keys, so that warps stay together.
template <class T, class C>
struct BoundedBiases {
  const Block<T, C, kKeyMask>& block;
  const int place = threadIdx.x % C::kKeys;
  const char* element;
  uint32_t bits;

  // Of the last tile.
  __device__ __forceinline__ explicit BoundedBiases(const Block<T, C, kKeyMask>& block)
      : block(block),
        element(mask_element(block.p, block.plan, block.work.batch, block.work.head, 0,
                             block.last_tile * C::kKeys + place)) {
    static_assert(C::kThreads % C::kKeys == 0 && C::kKeys % 32 == 0);
    const bool inside = block.first_tile <= block.last_tile &&
                        block.last_tile * C::kKeys + place < block.range.limit;
    bits = inside ? mask_bits(element, block.plan.mask_bytes) : 0;
    if (threadIdx.x < C::kRun) zeros()[threadIdx.x] = 0.f;
  }
  __device__ __forceinline__ void read_next() {
    element -= C::kKeys * block.plan.mask_step;
    bits = mask_bits(element, block.plan.mask_bytes);
  }
  __device__ __forceinline__ void store(int tile) const {
    float* const run = of(tile) + place / C::kRun * C::kBiasRun;
    const float bias = mask_bias(bits, block.p.mask_dtype), bound = warp_maximum(bias);
    if (C::kKeys == C::kThreads || threadIdx.x < C::kKeys) {
      run[place % C::kRun] = bias;
      if (place % C::kRun == 0) run[C::kRun] = bound;
    }
  }
  __device__ __forceinline__ float* of(int tile) const {
    return block.biases + (tile & 1) * C::kBiases;
  }
  // As a run without biases.
  __device__ __forceinline__ float* zeros() const { return block.biases + 2 * C::kBiases; }
};

// Scores, softmax and P V over all tiles, last to first, under a mask that does not depend on the
// query. Products begin with minus the row's maximum instead of 0, which leaves the addition in the
// exponent for the bias; and a bound of the biases, known for each run, tells whether a maximum may
// have to be raised. So a tile makes as many passes over its scores as without a mask. Where that
// does not do, maxima are far from 0 or may have to be raised, biases are added beforehand.
template <class T, class C>
__device__ __forceinline__ void walk_masked(const Block<T, C, kKeyMask>& block,
                                            RowState<C>& state) {
  const Plan& plan = block.plan;
  BoundedBiases<T, C> biases(block);
  clear<C>(state);
  if (block.first_tile <= block.last_tile) {
    block.load_keys(block.last_tile);
    biases.store(block.last_tile);
  } else {
    copy_wait();  // Q has to arrive before its place is used again
    __syncthreads();
  }
  const uint32_t lane_q = block.lane_q(), lane_k = block.lane_k(), lane_v = block.lane_v();
#pragma unroll 1
  for (int tile = block.last_tile; tile >= block.first_tile; --tile) {
    const int first_key = tile * C::kKeys;
    const bool more = tile > block.first_tile;
    copy_wait();  // K is here, and everybody is done with V
    __syncthreads();
    const float* run = biases.of(tile) + block.lane.quad * C::kBiasRun;
    const float bound = run[C::kRun];
    block.load_values(tile);
    if (more) biases.read_next();
    if (__all_sync(0xffffffffu, bound == -INFINITY)) {  // no query sees a key of the tile
      if (more) block.load_keys(tile - 1);
      biases.store(tile - 1);
      continue;
    }
    const bool relative = all_near<C>(state, bound);
    const float inverse = -reciprocal_approximate(plan.factor);
    float begin[C::kRowTiles][4];
#pragma unroll
    for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) begin[r][i] = relative ? state.maximum[r][i / 2] * inverse : 0.f;
    }
    Scores<C> scores;
    multiply_keys<T, C>(lane_q, {}, lane_k, begin, scores);
    copy_wait();  // V is here, and everybody is done with K
    __syncthreads();
    if (more) block.load_keys(tile - 1);
    if (first_key < block.clear_begin || first_key + C::kKeys > block.clear_end)
      apply_bounds<C>(block.range, block.lane, block.work.first_query, first_key, scores);
    float factor = plan.factor;
    if (relative) {
      raise_taken<C>(scores, factor, run, state);
    } else {
      add_key_biases<C, false>(block.lane, factor, biases.of(tile), scores);
      raise_maxima<C>(scores, 1.f, state);
      take_maxima<C>(state, scores);
      factor = 1.f, run = biases.zeros();
    }
    biases.store(tile - 1);  // of the tile before the first: to where nobody looks
    add_values<T, C, true>(scores, factor, run, lane_v, state);
  }
  copy_wait();  // for values of a hidden tile, before their place is used for something else
}

}  // namespace flashonnx::sm80

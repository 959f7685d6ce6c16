// The kernel: one block per tile of queries of one head, in one pass over the keys that its queries
// may see.
//
// K and V have one tile each: V is copied while Q K^T runs, the next K during softmax and P V.
#pragma once

#include "kernels/sm80/careful.cuh"
#include "kernels/sm80/epilogue.cuh"
#include "kernels/sm80/key_mask.cuh"

namespace flashonnx::sm80 {

// Rows that saw no key get the mean of V. Bit 4 i of an entry of `empty` is row i. Every thread of
// the block calls this.
template <class T, class C>
__device__ __forceinline__ void store_means(const Problem& p, const Lane& lane, const Work& work,
                                            const uint32_t (&empty)[C::kRowTiles][2],
                                            float* scratch) {
  bool any = false;
#pragma unroll
  for (int r = 0; r < C::kRowTiles; ++r) any |= (empty[r][0] | empty[r][1]) != 0;
  if (!__syncthreads_or(any)) return;
  const T* v = static_cast<const T*>(p.v.data) + work.batch * p.v.batch + work.kv_head * p.v.head;
  mean_of_values<T, C>(v, p.v.row, key_length_of(p, work.batch), p.value_dim, lane, scratch);
#pragma unroll
  for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll 1
      for (uint32_t rows = empty[r][h] & 0x11111111u; rows != 0; rows &= rows - 1) {
        const int query =
            work.first_query + lane.warp * C::kWarpQueries + r * 16 + h * 8 + (__ffs(rows) - 1) / 4;
        if (query >= p.q_length) continue;
        const int64_t at = work.batch * p.o.batch + work.head * p.o.head + query * p.o.row;
        for (int d = lane.lane; d < p.value_dim; d += 32) store_element(p, at + d, scratch[d]);
      }
    }
  }
}

// Everything after the last key.
template <class T, class C, Instance kInstance>
__device__ __forceinline__ void finish(const Problem& p, const Plan& plan, const Lane& lane,
                                       RowState<C>& state, unsigned char* memory,
                                       const Place* place) {
  const Work work = kInstance == kGathered ? place->work : work_of<C>(plan, block_index());
  const int queries = kInstance == kGathered ? place->sequence.queries : p.q_length;
  const int token = kInstance == kGathered ? place->sequence.first_query : 0;
  const int first = work.first_query + lane.warp * C::kWarpQueries;
  uint32_t empty[C::kRowTiles][2];
#pragma unroll
  for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float sum = quad_sum(state.sum[r][h]);
      const float scale = normaliser(p, work.head, state.maximum[r][h], sum);
#pragma unroll
      for (int d = 0; d < C::kDimTiles; ++d) {
        state.output[r][d][2 * h] *= scale;
        state.output[r][d][2 * h + 1] *= scale;
      }
      empty[r][h] = __ballot_sync(0xffffffffu, sum == 0.f);
      const int query = first + r * 16 + h * 8 + lane.row;
      if (p.lse.data && lane.quad == 0 && query < queries) {
        float* lse = static_cast<float*>(p.lse.data) + work.batch * p.lse.batch +
                     work.head * p.lse.head + (token + query) * p.lse.row;
        *lse = natural_lse(p, state.maximum[r][h], sum);
      }
    }
  }
  const int64_t at = work.batch * p.o.batch + work.head * p.o.head + (token + first) * p.o.row;
  store_rows<T, C>(p, plan, lane, at, queries - first, state.output,
                   shared_address(memory) + lane.warp * C::kWarpQueries * C::kDim * 2);
  if (kInstance != kGathered && p.empty_row_mean) {
    store_means<T, C>(p, lane, work, empty, reinterpret_cast<float*>(memory + C::kQueryBytes));
  }
}

// A mask that does not depend on the query is read once per key, a tile ahead, by as many threads.
// As well where a page's slot is, whose bias is -infinity if there is no page.
template <class T, class C, Instance kInstance>
struct KeyBiases {
  const Block<T, C, kInstance>& block;
  const bool active;
  const char* element;
  uint32_t bits = 0;
  Slot slot = {0, 0};

  __device__ __forceinline__ explicit KeyBiases(const Block<T, C, kInstance>& block)
      : block(block),
        active(kInstance != kPlain && (block.plan.mask_per_key || block.paged()) &&
               threadIdx.x < C::kKeys),
        element(mask_element(block.p, block.plan, block.work.batch, block.work.head, 0,
                             block.last_tile * C::kKeys + static_cast<int>(threadIdx.x))) {}

  // Whether the biases are (also) a mask's.
  __device__ __forceinline__ bool masks() const {
    return kInstance != kGathered || (block.plan.mask_per_key && block.p.mask.data);
  }
  __device__ __forceinline__ void read_last() {
    const int key = block.last_tile * C::kKeys + static_cast<int>(threadIdx.x);
    const bool inside = key < block.range.limit;
    if (active && block.paged())
      slot = inside ? slot_of(block.p.pages, block.work.batch, key) : Slot{-1, -1};
    bits = active && masks() && inside ? mask_bits(element, block.plan.mask_bytes) : 0;
  }
  // Of the tile before `tile`.
  __device__ __forceinline__ void read_next(int tile) {
    if (!active) return;
    if (block.paged()) {
      const int key = (tile - 1) * C::kKeys + static_cast<int>(threadIdx.x);
      slot = slot_of(block.p.pages, block.work.batch, key);
    }
    if (!masks()) return;
    element -= C::kKeys * block.plan.mask_step;
    bits = mask_bits(element, block.plan.mask_bytes);
  }
  // Writes where the key's row is.
  __device__ __forceinline__ void store_slot(int tile) const {
    if (active && block.paged()) block.slots_of(tile)[threadIdx.x] = slot;
  }
  // Returns whether this thread's bias changes scores.
  __device__ __forceinline__ bool store(int tile) const {
    if (!active) return false;
    const bool absent = slot.page < 0 && slot.slot >= 0;
    const float mask = masks() ? mask_bias(bits, block.p.mask_dtype) : 0.f;
    const float bias = absent ? -INFINITY : mask;
    of(tile)[threadIdx.x / C::kRun * C::kBiasRun + threadIdx.x % C::kRun] = bias;
    return bias != 0.f;
  }
  __device__ __forceinline__ float* of(int tile) const {
    // Of either, ptxas makes the faster kernel.
    const int half = kInstance == kKeyMask ? tile & 1 : tile % 2;
    return block.biases + half * C::kBiases;
  }
};

// Scores, softmax and P V over all tiles, last to first.
template <class T, class C, Instance kInstance, bool kCareful>
__device__ __forceinline__ void walk(const Block<T, C, kInstance>& block, RowState<C>& state) {
  const Problem& p = block.p;
  const Plan& plan = block.plan;
  const Work& work = block.work;
  KeyBiases<T, C, kInstance> biases(block);
  bool biased = false;
  clear<C>(state);
  if (block.first_tile <= block.last_tile) {
    if (block.paged()) {
      biases.read_last();
      biases.store_slot(block.last_tile);
      __syncthreads();
    }
    block.load_keys(block.last_tile);
    if (!block.paged()) biases.read_last();
    biased = biases.store(block.last_tile);
  }
  QueryFragments<C> queries;
  if (C::kQuerySteps > 0 || block.first_tile > block.last_tile) {
    copy_wait();  // without keys too: Q has to arrive before its place is used again
    __syncthreads();
#pragma unroll
    for (int step = 0; step < C::kQuerySteps; ++step) {
      load_queries<C>(block.lane_q(), 2 * step, queries[step]);
    }
  }
  const uint32_t lane_q = block.lane_q(), lane_k = block.lane_k(), lane_v = block.lane_v();
#pragma unroll 1
  for (int tile = block.last_tile; tile >= block.first_tile; --tile) {
    const int first_key = tile * C::kKeys;
    const bool more = tile > block.first_tile;
    copy_wait();  // K is here, and everybody is done with V
    bool general = false;
    if constexpr (kInstance != kPlain) {
      general = __syncthreads_or(biased) || plan.all_tiles;
    } else {
      __syncthreads();
    }
    block.load_values(tile);
    if (kInstance != kPlain && more) {
      biases.read_next(tile);
      if (p.mask.data && !plan.mask_per_key) {
        prefetch_mask<C>(p, plan, work.batch, work.head, work.first_query, first_key - C::kKeys);
      }
    }
    Scores<C> scores;
    multiply_keys<T, C>(lane_q, queries, lane_k, {}, scores);
    if (more) biases.store_slot(tile - 1);
    copy_wait();  // V is here, and everybody is done with K
    __syncthreads();
    if (more) block.load_keys(tile - 1);
    if constexpr (kCareful) {
      clean_values<T, C>(block.shared_v, block.flags);
      __syncthreads();
    }
    float factor = plan.factor;
    if (general) {
      if constexpr (kInstance == kKeyMask) {
        add_key_biases<C, kCareful>(block.lane, factor, biases.of(tile), scores);
      } else {
        general_scores<T, C, kCareful>(p, plan, block.lane, work.batch, work.head, work.first_query,
                                       first_key, block.range.limit, biases.of(tile), scores);
      }
      if (block.paged() && !plan.mask_per_key)
        add_key_biases<C, kCareful>(block.lane, 1.f, biases.of(tile), scores);
      factor = 1.f;
    }
    if (first_key < block.clear_begin || first_key + C::kKeys > block.clear_end) {
      apply_bounds<C>(block.range, block.lane, work.first_query, first_key, scores);
    }
    raise_maxima<C>(scores, factor, state);
    if constexpr (kCareful) {
      add_nonfinite<T, C>(
          block.lane, scores, factor, block.flags,
          [&](int key) { return block.value_row(tile, key); }, p.value_dim, state);
    }
    add_values<T, C, false>(scores, factor, nullptr, lane_v, state);
    if (kInstance != kPlain && more) biased = biases.store(tile - 1);
  }
}

// A function of its own, so that its needs do not show in the registers of the other walk.
template <class T, class C, Instance kInstance>
__device__ __noinline__ void attend_carefully(const Problem& p, const Plan& plan,
                                              unsigned char* memory, const Place* place) {
  RowState<C> state;
  walk<T, C, kInstance, true>(Block<T, C, kInstance>(p, plan, memory, place), state);
  finish<T, C, kInstance>(p, plan, Lane(), state, memory, place);
}

template <class T, class C, Instance kInstance>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks)
    attention(const __grid_constant__ Problem p, const __grid_constant__ Plan plan) {
  unsigned char* const memory = shared_memory();
  Place* const place =
      kInstance == kGathered ? reinterpret_cast<Place*>(memory + C::kPlace) : nullptr;
  if (kInstance == kGathered && !take_place<C>(p, plan, place)) return;
  RowState<C> state;
  if constexpr (kInstance == kKeyMask) {
    walk_masked<T, C>(Block<T, C, kInstance>(p, plan, memory, place), state);
  } else {
    walk<T, C, kInstance, false>(Block<T, C, kInstance>(p, plan, memory, place), state);
  }
  const bool may_be_masked =
      p.mask.data || p.left >= 0 || p.right >= 0 || (kInstance == kGathered && p.pages.table);
  if (may_be_masked && __syncthreads_or(holds_nan<C>(state))) {
    attend_carefully<T, CarefulTiling<C>, kInstance>(p, plan, memory, place);
  } else {
    finish<T, C, kInstance>(p, plan, Lane(), state, memory, place);
  }
}

}  // namespace flashonnx::sm80

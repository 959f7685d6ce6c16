// The kernel: one block per tile of queries of one head, in one pass over the keys that its queries
// may see.
//
// K and V have one tile each: V is copied while Q K^T runs, the next K during softmax and P V.
#pragma once

#include "kernels/tf32/careful.cuh"
#include "kernels/tf32/epilogue.cuh"
#include "kernels/tf32/products.cuh"

namespace flashonnx::tf32 {

// Where a block's data stands, and which tiles of keys it walks over.
template <class C>
struct Block {
  const Problem& p;
  const Plan& plan;
  const Lane lane;
  const Work work;
  const uint32_t shared_q, shared_k, shared_v;
  float* const biases;  // of the keys of two tiles
  KeyRange range;
  int first_tile, last_tile;   // first > last: no query sees a key
  int clear_begin, clear_end;  // keys that all queries see
  const float *k, *v;

  __device__ __forceinline__ Block(const Problem& p, const Plan& plan, unsigned char* memory)
      : p(p),
        plan(plan),
        work(work_of<C>(plan, sm80::block_index())),
        shared_q(sm80::shared_address(memory)),
        shared_k(shared_q + C::kQueryBytes),
        shared_v(shared_k + C::kKeyBytes),
        biases(reinterpret_cast<float*>(memory + C::kQueryBytes + 2 * C::kKeyBytes)) {
    // Q first: the rest is computed while it is on its way.
    const float* q = static_cast<const float*>(p.q.data) + work.batch * p.q.batch +
                     work.head * p.q.head + work.first_query * p.q.row;
    load_tile<C, QueryLayout<C>, C::kQueries>(shared_q, q, p.q.row, p.q_length - work.first_query,
                                              p.head_dim, plan.q_vectors);
    range = key_range(p, key_length_of(p, work.batch));
    const int last_query = min(work.first_query + C::kQueries, p.q_length) - 1;
    const int begin = range.lower(work.first_query), end = range.upper(last_query);
    clear_begin = range.lower(last_query), clear_end = range.upper(work.first_query);
    first_tile = begin / C::kKeys;
    last_tile = begin < end ? (end - 1) / C::kKeys : first_tile - 1;
    k = static_cast<const float*>(p.k.data) + work.batch * p.k.batch + work.kv_head * p.k.head;
    v = static_cast<const float*>(p.v.data) + work.batch * p.v.batch + work.kv_head * p.v.head;
  }

  __device__ __forceinline__ void load_keys(int tile) const {
    const int first = tile * C::kKeys;
    load_tile<C, KeyLayout<C>, C::kKeys>(shared_k, k + first * p.k.row, p.k.row,
                                         range.limit - first, p.head_dim, plan.k_vectors);
  }
  __device__ __forceinline__ void load_values(int tile) const {
    const int first = tile * C::kKeys;
    load_tile<C, KeyLayout<C>, C::kKeys>(shared_v, v + first * p.v.row, p.v.row,
                                         range.limit - first, p.value_dim, plan.v_vectors);
  }

  // The lane's rows for ldmatrix: two blocks of 8 rows by two chunks. In blocks of keys, row i
  // belongs to run i / 2.
  __device__ __forceinline__ uint32_t lane_q() const {
    return shared_q +
           QueryLayout<C>::offset(lane.warp * C::kWarpQueries + lane.lane % 16, lane.lane / 16);
  }
  __device__ __forceinline__ uint32_t lane_k() const {
    const int key = lane.lane % 8 / 2 * C::kRun + lane.lane % 2;
    return shared_k + KeyLayout<C>::offset(key + lane.lane / 16 * 2, lane.lane / 8 % 2);
  }
  __device__ __forceinline__ uint32_t lane_v() const {
    return shared_v + KeyLayout<C>::offset(lane.quad * C::kRun, lane.row / 2) + lane.row % 2 * 8;
  }
};

// A mask that does not depend on the query is read once per key, a tile ahead, by as many threads.
template <class C>
struct KeyBiases {
  const Block<C>& block;
  const bool active;
  const char* element;
  uint32_t bits = 0;

  __device__ __forceinline__ KeyBiases(const Block<C>& block, bool general)
      : block(block),
        active(general && block.plan.mask_per_key && threadIdx.x < C::kKeys),
        element(mask_element(block.p, block.plan, block.work.batch, block.work.head, 0,
                             block.last_tile * C::kKeys + static_cast<int>(threadIdx.x))) {}

  __device__ __forceinline__ void read_last() {
    const int key = block.last_tile * C::kKeys + static_cast<int>(threadIdx.x);
    bits = active && key < block.range.limit ? mask_bits(element, block.plan.mask_bytes) : 0;
  }
  __device__ __forceinline__ void read_next() {
    if (!active) return;
    element -= C::kKeys * block.plan.mask_step;
    bits = mask_bits(element, block.plan.mask_bytes);
  }
  // Returns whether this thread's bias changes scores.
  __device__ __forceinline__ bool store(int tile) const {
    if (!active) return false;
    const float bias = mask_bias(bits, block.p.mask_dtype);
    of(tile)[threadIdx.x / C::kRun * C::kBiasRun + threadIdx.x % C::kRun] = bias;
    return bias != 0.f;
  }
  __device__ __forceinline__ float* of(int tile) const {
    return block.biases + tile % 2 * C::kBiases;
  }
};

// Scores, softmax and P V over all tiles, last to first.
template <class C, bool kGeneral, bool kCareful>
__device__ __forceinline__ void walk(const Block<C>& block, RowState<C>& state) {
  const Problem& p = block.p;
  const Plan& plan = block.plan;
  const Work& work = block.work;
  KeyBiases<C> biases(block, kGeneral);
  bool biased = false;
  sm80::clear<C>(state);
  if (block.first_tile <= block.last_tile) {
    block.load_keys(block.last_tile);
    biases.read_last();
    biased = biases.store(block.last_tile);
  } else {  // Q has to arrive before its place is used again
    copy_wait();
    __syncthreads();
  }
  const uint32_t lane_q = block.lane_q(), lane_k = block.lane_k(), lane_v = block.lane_v();
#pragma unroll 1
  for (int tile = block.last_tile; tile >= block.first_tile; --tile) {
    const int first_key = tile * C::kKeys;
    const bool more = tile > block.first_tile;
    copy_wait();  // K is here, and everybody is done with V
    bool general = false;
    if constexpr (kGeneral) {
      general = __syncthreads_or(biased) || plan.all_tiles;
    } else {
      __syncthreads();
    }
    block.load_values(tile);
    if (kGeneral && more) {
      biases.read_next();
      if (p.mask.data && !plan.mask_per_key) {
        sm80::prefetch_mask<C>(p, plan, work.batch, work.head, work.first_query,
                               first_key - C::kKeys);
      }
    }
    Scores<C> scores;
    if constexpr (kCareful) {
      multiply_keys_carefully<C>(block.lane, block.shared_q, block.shared_k, scores);
    } else {
      multiply_keys<C>(lane_q, lane_k, scores);
    }
    copy_wait();  // V is here, and everybody is done with K
    __syncthreads();
    if (more) block.load_keys(tile - 1);
    float factor = plan.factor;
    if (general) {
      general_scores<C, kCareful>(p, plan, block.lane, work.batch, work.head, work.first_query,
                                  first_key, block.range.limit, biases.of(tile), scores);
      factor = 1.f;
    }
    if (first_key < block.clear_begin || first_key + C::kKeys > block.clear_end) {
      sm80::apply_bounds<C>(block.range, block.lane, work.first_query, first_key, scores);
    }
    sm80::raise_maxima<C>(scores, factor, state);
    if constexpr (kCareful) {
      multiply_values_carefully<C>(block.lane, scores, factor, block.shared_v, state);
    } else {
      multiply_values<C>(scores, factor, lane_v, state);
    }
    if (kGeneral && more) biased = biases.store(tile - 1);
  }
  if constexpr (kCareful) end_carefully<C>(state);
}

// A function of its own, so that its needs do not show in the registers of the other walk.
template <class C, bool kGeneral>
__device__ __noinline__ void attend_carefully(const Problem& p, const Plan& plan,
                                              unsigned char* memory) {
  RowState<C> state;
  walk<C, kGeneral, true>(Block<C>(p, plan, memory), state);
  finish<C>(p, plan, Lane(), state, reinterpret_cast<float*>(memory));
}

template <class C, bool kGeneral>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks)
    attention(const __grid_constant__ Problem p, const __grid_constant__ Plan plan) {
  unsigned char* const memory = sm80::shared_memory();
  RowState<C> state;
  walk<C, kGeneral, false>(Block<C>(p, plan, memory), state);
  if (__syncthreads_or(holds_nan<C>(state))) {
    attend_carefully<C, kGeneral>(p, plan, memory);
  } else {
    finish<C>(p, plan, Lane(), state, reinterpret_cast<float*>(memory));
  }
}

}  // namespace flashonnx::tf32

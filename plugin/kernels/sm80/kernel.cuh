// The kernel: one block per tile of queries of one head, in one pass over the keys that its queries
// may see.
//
// With one stage, K and V have one tile each: V is copied while Q K^T runs, the next K during
// softmax and P V. With two, both tiles of the next keys are copied during the whole step, for one
// barrier less.
#pragma once

#include "kernels/sm80/repair.cuh"

namespace flashonnx::sm80 {

struct Work {
  int32_t batch, head, kv_head, first_query;
};

// The block's index, each time anew: what is computed from it again need not stay in registers
// meanwhile.
__device__ __forceinline__ uint32_t block_index() {
  uint32_t x;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
  return x;
}

template <class C>
__device__ __forceinline__ Work work_of(const Plan& plan, uint32_t block) {
  const uint32_t section = plan.section_tiles.quotient(block);
  const uint32_t rest = block - section * plan.section_tiles.divisor;
  const uint32_t tile = plan.section.quotient(rest);
  const uint32_t batch_head = (section - tile) * plan.section.divisor + rest;
  const uint32_t batch = plan.q_heads.quotient(batch_head);
  const uint32_t head = batch_head - batch * plan.q_heads.divisor;
  return {static_cast<int32_t>(batch), static_cast<int32_t>(head),
          static_cast<int32_t>(plan.group.quotient(head)),
          static_cast<int32_t>(plan.longest_last ? plan.row_tiles - 1 - tile : tile) * C::kQueries};
}

template <class C>
using QueryFragments = uint32_t[C::kQuerySteps > 0 ? C::kQuerySteps : 1][C::kRowTiles][4];

// 16 features of the warp's queries, from feature 8 d on.
template <class C>
__device__ __forceinline__ void load_queries(uint32_t queries, int d,
                                             uint32_t (&q)[C::kRowTiles][4]) {
  using L = QueryLayout<C>;
#pragma unroll
  for (int r = 0; r < C::kRowTiles; ++r)
    load_matrices(q[r], L::advance(queries, d) + r * 16 * C::kDim * 2);
}

// scores = Q K^T of the warp's rows. `queries` and `keys` are the lane's addresses for ldmatrix.
template <class T, class C>
__device__ __forceinline__ void multiply_keys(uint32_t queries, const QueryFragments<C>& held,
                                              uint32_t keys, Scores<C>& scores) {
  using L = KeyLayout<C>;
#pragma unroll
  for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
    for (int n = 0; n < C::kKeyTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[r][n][i] = 0.f;
    }
  }
#pragma unroll
  for (int d = 0; d < C::kDimTiles; d += 2) {
    uint32_t loaded[C::kRowTiles][4];
    if (d / 2 >= C::kQuerySteps) load_queries<C>(queries, d, loaded);
    const auto& q = d / 2 < C::kQuerySteps ? held[d / 2] : loaded;
#pragma unroll
    for (int n = 0; n < C::kKeyTiles; n += 2) {
      uint32_t k[4];
      load_matrices(k, L::advance(keys, d) + 2 * n * C::kDim * 2);
#pragma unroll
      for (int r = 0; r < C::kRowTiles; ++r) {
        multiply<T>(scores[r][n], q[r], k[0], k[1]);
        multiply<T>(scores[r][n + 1], q[r], k[2], k[3]);
      }
    }
  }
}

// Which rows hold a NaN (or an infinity: it is zero times them that is looked at).
template <class C>
__device__ __forceinline__ void find_lost_rows(const RowState<C>& state,
                                               uint32_t (&lost)[C::kRowTiles][2]) {
#pragma unroll
  for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = 0.f;
#pragma unroll
      for (int d = 0; d < C::kDimTiles; ++d) {
        sum = fmaf(state.output[r][d][2 * h], 0.f, fmaf(state.output[r][d][2 * h + 1], 0.f, sum));
      }
      lost[r][h] = __ballot_sync(0xffffffffu, quad_sum(sum) != 0.f);
    }
  }
}

// Rows that few problems have: `lost` ones hold a NaN, `empty` ones saw no key. Bit 4 i of an entry
// is row i.
template <class T, class C>
__device__ __forceinline__ void mend_rows(const Problem& p, const Plan& plan, const Lane& lane,
                                          const Work& work, const uint32_t (&lost)[C::kRowTiles][2],
                                          uint32_t (&empty)[C::kRowTiles][2], float* scratch) {
  bool any_empty = false;
  const int first = work.first_query + lane.warp * C::kWarpQueries;
  __syncwarp();  // the rows have been stored by other lanes
#pragma unroll
  for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll 1
      for (uint32_t rows = lost[r][h] & 0x11111111u; rows != 0; rows &= rows - 1) {
        const int query = first + r * 16 + h * 8 + (__ffs(rows) - 1) / 4;
        if (query < p.q_length &&
            !repair_row<T, C>(p, plan, lane.lane, work.batch, work.head, query)) {
          empty[r][h] |= rows & -rows;
        }
      }
      any_empty |= empty[r][h] != 0;
    }
  }
  if (!p.empty_row_mean || !__syncthreads_or(any_empty)) return;
  const T* v = static_cast<const T*>(p.v.data) + work.batch * p.v.batch + work.kv_head * p.v.head;
  mean_of_values<T, C>(v, p.v.row, key_length_of(p, work.batch), p.value_dim, lane, scratch);
#pragma unroll
  for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll 1
      for (uint32_t rows = empty[r][h] & 0x11111111u; rows != 0; rows &= rows - 1) {
        const int query = first + r * 16 + h * 8 + (__ffs(rows) - 1) / 4;
        if (query >= p.q_length) continue;
        const int64_t at = work.batch * p.o.batch + work.head * p.o.head + query * p.o.row;
        for (int d = lane.lane; d < p.value_dim; d += 32) store_element(p, at + d, scratch[d]);
      }
    }
  }
}

// Everything after the last key.
template <class T, class C>
__device__ __forceinline__ void finish(const Problem& p, const Plan& plan, const Lane& lane,
                                       RowState<C>& state, unsigned char* memory) {
  const Work work = work_of<C>(plan, block_index());
  const int first = work.first_query + lane.warp * C::kWarpQueries;
  uint32_t lost[C::kRowTiles][2] = {}, empty[C::kRowTiles][2];
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
      if (p.lse.data && lane.quad == 0 && query < p.q_length) {
        static_cast<float*>(
            p.lse.data)[work.batch * p.lse.batch + work.head * p.lse.head + query * p.lse.row] =
            natural_lse(state.maximum[r][h], sum);
      }
    }
  }
  if (p.mask.data || p.left >= 0 || p.right >= 0) find_lost_rows<C>(state, lost);
  const int64_t at = work.batch * p.o.batch + work.head * p.o.head + first * p.o.row;
  store_rows<T, C>(p, plan, lane, at, p.q_length - first, state.output,
                   shared_address(memory) + lane.warp * C::kWarpQueries * C::kDim * 2);
  mend_rows<T, C>(p, plan, lane, work, lost, empty,
                  reinterpret_cast<float*>(memory + C::kQueryBytes));
}

template <class T, class C, bool kGeneral>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks)
    attention(const __grid_constant__ Problem p, const __grid_constant__ Plan plan) {
  extern __shared__ __align__(128) unsigned char memory[];
  const uint32_t shared_q = shared_address(memory);
  const uint32_t shared_k = shared_q + C::kQueryBytes;
  const uint32_t shared_v = shared_k + C::kStages * C::kKeyBytes;
  float* const biases =
      reinterpret_cast<float*>(memory + C::kQueryBytes + 2 * C::kStages * C::kKeyBytes);

  const Lane lane;
  const Work work = work_of<C>(plan, block_index());
  const int first_query = work.first_query;
  const T* q = static_cast<const T*>(p.q.data) + work.batch * p.q.batch + work.head * p.q.head +
               first_query * p.q.row;
  load_tile<C, QueryLayout<C>, C::kQueries>(shared_q, q, p.q.row, p.q_length - first_query,
                                            p.head_dim, plan.q_vectors);

  const KeyRange range = key_range(p, key_length_of(p, work.batch));
  const int last_query = min(first_query + C::kQueries, p.q_length) - 1;
  const int begin = range.lower(first_query), end = range.upper(last_query);  // what any query sees
  const int clear_begin = range.lower(last_query),
            clear_end = range.upper(first_query);  // what all queries see
  const int first_tile = begin / C::kKeys;
  const int last_tile = begin < end ? (end - 1) / C::kKeys : first_tile - 1;

  const T* const k =
      static_cast<const T*>(p.k.data) + work.batch * p.k.batch + work.kv_head * p.k.head;
  const T* const v =
      static_cast<const T*>(p.v.data) + work.batch * p.v.batch + work.kv_head * p.v.head;
  const auto load_keys = [&](int tile) {
    const int64_t first = int64_t{tile} * C::kKeys;
    load_tile<C, KeyLayout<C>, C::kKeys>(
        shared_k + tile % C::kStages * C::kKeyBytes, k + first * p.k.row, p.k.row,
        range.limit - static_cast<int>(first), p.head_dim, plan.k_vectors);
  };
  const auto load_values = [&](int tile) {
    const int64_t first = int64_t{tile} * C::kKeys;
    load_tile<C, KeyLayout<C>, C::kKeys>(
        shared_v + tile % C::kStages * C::kKeyBytes, v + first * p.v.row, p.v.row,
        range.limit - static_cast<int>(first), p.value_dim, plan.v_vectors);
  };
  // A mask that does not depend on the query is read once per key, a tile ahead, by as many
  // threads.
  const bool mask_per_query = kGeneral && p.mask.data && !plan.mask_per_key;
  const bool per_key = kGeneral && plan.mask_per_key && threadIdx.x < C::kKeys;
  const int thread_key = last_tile * C::kKeys + static_cast<int>(threadIdx.x);
  const char* mask_at = mask_element(p, plan, work.batch, work.head, 0, thread_key);
  float* const bias_at = biases + threadIdx.x / C::kRun * C::kBiasRun + threadIdx.x % C::kRun;
  const auto store_bias = [&](int tile, uint32_t bits) {  // returns whether it changes a score
    const float bias = mask_bias(bits, p.mask_dtype);
    bias_at[tile % 2 * C::kBiases] = bias;
    return bias != 0.f;
  };

  bool biased = false;
  if (first_tile <= last_tile) {
    load_keys(last_tile);
    if constexpr (C::kStages == 2) load_values(last_tile);
    if (per_key) {
      const bool inside = thread_key < range.limit;
      biased = store_bias(last_tile, inside ? mask_bits(mask_at, plan.mask_bytes) : 0);
    }
  }
  // The lane's rows for ldmatrix: two blocks of 8 rows by two chunks. In blocks of keys, row i
  // belongs to run i / 2.
  const int i = lane.lane % 8, run_key = i / 2 * C::kRun + i % 2;
  const uint32_t lane_q =
      shared_q +
      QueryLayout<C>::offset(lane.warp * C::kWarpQueries + lane.lane % 16, lane.lane / 16);
  const uint32_t lane_k =
      shared_k + KeyLayout<C>::offset(run_key + lane.lane / 16 * 2, lane.lane / 8 % 2);
  const uint32_t lane_v =
      shared_v + KeyLayout<C>::offset(run_key + lane.lane / 8 % 2 * 2, lane.lane / 16);

  QueryFragments<C> queries;
  if (C::kQuerySteps > 0 ||
      first_tile > last_tile) {  // without keys, Q still has to arrive before its place is reused
    copy_wait();
    __syncthreads();
#pragma unroll
    for (int step = 0; step < C::kQuerySteps; ++step)
      load_queries<C>(lane_q, 2 * step, queries[step]);
  }
  RowState<C> state;
  clear(state);
#pragma unroll 1
  for (int tile = last_tile; tile >= first_tile; --tile) {
    const int first_key = tile * C::kKeys;
    const uint32_t stage = tile % C::kStages * C::kKeyBytes;
    copy_wait();
    bool general = false;
    if constexpr (kGeneral) {
      general = __syncthreads_or(biased) || plan.all_tiles;
    } else {
      __syncthreads();
    }
    if constexpr (C::kStages == 1) {
      load_values(tile);
    } else if (tile > first_tile) {
      load_keys(tile - 1);
      load_values(tile - 1);
    }
    uint32_t next_bias = 0;
    if (per_key && tile > first_tile) {
      mask_at -= plan.mask_step;
      next_bias = mask_bits(mask_at, plan.mask_bytes);
    }
    if (kGeneral && mask_per_query && tile > first_tile) {
      prefetch_mask<C>(p, plan, work.batch, work.head, first_query, first_key - C::kKeys);
    }

    Scores<C> scores;
    multiply_keys<T, C>(lane_q, queries, lane_k + stage, scores);
    if constexpr (C::kStages == 1) {
      copy_wait();
      __syncthreads();
      if (tile > first_tile) load_keys(tile - 1);
    }
    float factor = plan.factor;
    if (general) {
      general_scores<C>(p, plan, lane, work.batch, work.head, first_query, first_key, range.limit,
                        biases + tile % 2 * C::kBiases, scores);
      factor = 1.f;
    }
    if (first_key < clear_begin || first_key + C::kKeys > clear_end) {
      apply_bounds<C>(range, lane, first_query, first_key, scores);
    }
    raise_maxima<C>(scores, factor, state);
    add_values<T, C>(scores, factor, lane_v + stage, state);
    if (per_key && tile > first_tile) biased = store_bias(tile - 1, next_bias);
  }

  finish<T, C>(p, plan, lane, state, memory);
}

}  // namespace flashonnx::sm80

// The producer warpgroup: one thread drives the copy engine, one warp reads masks that do not
// depend on the query.
#pragma once

#include "kernels/common/bias.cuh"
#include "kernels/sm90/careful.cuh"
#include "kernels/sm90/schedule.h"
#include "kernels/sm90/shared.cuh"

namespace flashonnx::sm90 {

struct Maps {
  CUtensorMap q, k, v, o, mask;
};

// Copies a tile of kRows rows, box by box.
template <class C, int kRows, int kBoxes>
__device__ __forceinline__ void copy_tile(uint32_t shared, const CUtensorMap* map, uint32_t barrier,
                                          int row, int head, int batch) {
  barrier_arrive_expecting(barrier, kRows * kBoxes * C::kBoxRow);
#pragma unroll
  for (int box = 0; box < kBoxes; ++box) {
    copy_box(shared + box * kRows * C::kBoxRow, map, barrier, box * C::kBox, row, head, batch);
  }
}

// Copies the mask of a tile of queries and one of keys.
template <class C>
__device__ __forceinline__ void copy_mask(const Problem& p, const Plan& plan, uint32_t shared,
                                          const CUtensorMap* map, uint32_t barrier,
                                          const Work& work, int first_key) {
  const int width = 128 / plan.mask_bytes;  // of a box
  for (int key = 0; key < C::kKeys; key += width) {
    copy_box(shared + key * C::kQueries * plan.mask_bytes, map, barrier, first_key + key,
             work.first_query, p.mask.head != 0 ? work.head : 0,
             p.mask.batch != 0 ? work.batch : 0);
  }
}

// K runs one tile ahead of V, from one tile of queries to the next: consumers multiply by the next
// keys beside their softmax.
template <class C>
__device__ __forceinline__ void produce(const Problem& p, const Plan& plan,
                                        const Schedule& schedule, const Maps& maps,
                                        const Shared<C>& shared) {
  prefetch(&maps.q), prefetch(&maps.k), prefetch(&maps.v);
  Ring<C::kQueryStages> queries;
  Ring<C::kStages> keys, values;
  Work values_of = {};
  int values_tile = -1;  // none is due
  const auto copy_due_values = [&] {
    if (values_tile < 0) return;
    barrier_wait(shared.v_free(values.stage), values.round ^ 1);
    copy_tile<C, C::kKeys, C::kValueBoxes>(shared.v(values.stage), &maps.v,
                                           shared.v_full(values.stage), values_tile * C::kKeys,
                                           values_of.kv_head, values_of.batch);
    values.advance();
    values_tile = -1;
  };
  const auto hand_out = [&](const Work& work, const Span& span) {
    barrier_wait(shared.q_free(queries.stage), queries.round ^ 1);
    *shared.item(queries.stage) = {work, span};
    const uint32_t full = shared.q_full(queries.stage);
    if (work.batch >= 0) {
      copy_tile<C, C::kQueries, C::kBoxes>(shared.q(queries.stage), &maps.q, full, work.first_query,
                                           work.head, work.batch);
    } else {
      barrier_arrive(full);
    }
    queries.advance();
  };
  for (int turn = 0; turn < schedule.turns; ++turn) {
    Work work;
    if (!schedule.work(turn, blockIdx.x, gridDim.x, C::kQueries, &work)) continue;
    const Span span = span_of<C>(p, work);
    // With one place for queries, the next ones wait until there is nothing left to do with these.
    if (C::kQueryStages == 1) copy_due_values();
    for (int tile = span.last_tile; tile >= span.first_tile; --tile) {
      barrier_wait(shared.k_free(keys.stage), keys.round ^ 1);
      if constexpr (C::kGeneral) {
        if (p.mask.data && !plan.mask_per_key) {
          barrier_expect(shared.k_full(keys.stage), C::kQueries * C::kKeys * plan.mask_bytes);
          copy_mask<C>(p, plan, shared.mask(keys.stage), &maps.mask, shared.k_full(keys.stage),
                       work, tile * C::kKeys);
        }
      }
      copy_tile<C, C::kKeys, C::kBoxes>(shared.k(keys.stage), &maps.k, shared.k_full(keys.stage),
                                        tile * C::kKeys, work.kv_head, work.batch);
      keys.advance();
      if (tile == span.last_tile) hand_out(work, span);
      copy_due_values();
      values_of = work, values_tile = tile;
    }
  }
  copy_due_values();
  hand_out({-1, 0, 0, 0}, {});
}

// What the mask adds to the scores of each key of the stages of K, by one warp.
template <class C>
__device__ __forceinline__ void produce_biases(const Problem& p, const Plan& plan,
                                               const Schedule& schedule, const Shared<C>& shared) {
  constexpr int kPerLane = (C::kKeys + 31) / 32;
  const int lane = threadIdx.x % 32;
  Ring<C::kStages> ring;
  for (int turn = 0; turn < schedule.turns; ++turn) {
    Work work;
    if (!schedule.work(turn, blockIdx.x, gridDim.x, C::kQueries, &work)) continue;
    const Span span = span_of<C>(p, work);
    const char* const row = mask_element(p, plan, work.batch, work.head, 0, 0);
    for (int tile = span.last_tile; tile >= span.first_tile; --tile) {
      uint32_t bits[kPerLane];
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const int key = tile * C::kKeys + 32 * i + lane;
        bits[i] =
            key < span.range.limit ? mask_bits(row + key * plan.mask_step, plan.mask_bytes) : 0;
      }
      barrier_wait(shared.k_free(ring.stage), ring.round ^ 1);
      bool biased = false;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const int key = 32 * i + lane;
        const float bias = mask_bias(bits[i], p.mask_dtype);
        if (key < C::kKeys) {
          shared.biases(ring.stage)[key] = bias;
          biased |= bias != 0.f && tile * C::kKeys + key < span.range.limit;
        }
      }
      biased = __any_sync(0xffffffffu, biased);
      __syncwarp();  // all lanes' biases are there before the arrival says so
      if (lane == 0) {
        *shared.biased(ring.stage) = biased;
        barrier_arrive(shared.k_full(ring.stage));
      }
      ring.advance();
    }
  }
}

// The rows of tiles that see no key, by one warp. Consumers do not hear of them: such tiles would
// take the places of queries while others wait for these.
template <class T, class C>
__device__ __forceinline__ void store_empty_tiles(const Problem& p, const Schedule& schedule) {
  const int lane = threadIdx.x % 32;
  for (int turn = 0; turn < schedule.turns; ++turn) {
    Work work;
    if (!schedule.work(turn, blockIdx.x, gridDim.x, C::kQueries, &work)) continue;
    const Span span = span_of<C>(p, work);
    if (span.first_tile <= span.last_tile) continue;
    float output[C::kDim / 32] = {};
    if (p.empty_row_mean) mean_of_values<T, C>(p, work, lane, output);
    const int end = min(work.first_query + C::kQueries, p.q_length);
#pragma unroll 1
    for (int query = work.first_query; query < end; ++query) {
      store_row<C>(p, work, query, lane, 1.f, output);
      if (lane == 0) store_lse(p, work, query, -INFINITY);
    }
  }
}

}  // namespace flashonnx::sm90

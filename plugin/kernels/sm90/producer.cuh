// The producer warpgroup: one thread drives the copy engine, one warp reads masks that do not
// depend on the query.
#pragma once

#include "kernels/common/bias.cuh"
#include "kernels/sm90/careful.cuh"
#include "kernels/sm90/schedule.h"
#include "kernels/sm90/visible.cuh"

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
// keys beside their softmax. `kMarked`: another warp finds the tiles.
template <class C, bool kMarked>
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
  const auto hand_out = [&](const Work& work, const Span& span, const Marks* marks) {
    barrier_wait(shared.q_free(queries.stage), queries.round ^ 1);
    Item* const item = shared.item(queries.stage);
    item->work = work, item->span = span;
    if (kMarked && work.batch >= 0) {
      const int end = min(span.last_tile / 32 + 1, kMarkedTiles / 32);
      for (int i = span.first_tile / 32; i < end; ++i) {
        item->marks.visible[i] = marks->visible[i];
        item->marks.biased[i] = marks->biased[i];
      }
    }
    const uint32_t full = shared.q_full(queries.stage);
    if (work.batch >= 0) {
      copy_tile<C, C::kQueries, C::kBoxes>(shared.q(queries.stage), &maps.q, full, work.first_query,
                                           work.head, work.batch);
    } else {
      barrier_arrive(full);
    }
    queries.advance();
  };
  const auto produce_tiles = [&](const Work& work, const Span& span, const Marks* marks) {
    // With one place for queries, the next ones wait until there is nothing left to do with these.
    if (C::kQueryStages == 1) copy_due_values();
    int tile = span.last_tile;
    while (tile >= span.first_tile) {
      barrier_wait(shared.k_free(keys.stage), keys.round ^ 1);
      if constexpr (C::kGeneral && !kMarked) {
        if (p.mask.data) {
          barrier_expect(shared.k_full(keys.stage), C::kQueries * C::kKeys * plan.mask_bytes);
          copy_mask<C>(p, plan, shared.mask(keys.stage), &maps.mask, shared.k_full(keys.stage),
                       work, tile * C::kKeys);
        }
      }
      copy_tile<C, C::kKeys, C::kBoxes>(shared.k(keys.stage), &maps.k, shared.k_full(keys.stage),
                                        tile * C::kKeys, work.kv_head, work.batch);
      keys.advance();
      if (tile == span.last_tile) hand_out(work, span, marks);
      copy_due_values();
      values_of = work, values_tile = tile;
      --tile;
      if constexpr (kMarked) tile = last_visible(marks->visible, tile, span.first_tile);
    }
  };
  if constexpr (kMarked) {
    Found<C> found(shared);
    while (found.next()->work.batch >= 0) {
      const Item& item = *found.next();
      produce_tiles(item.work, item.span, &item.marks);
      found.done();
    }
  } else {
    for (int turn = 0; turn < schedule.turns; ++turn) {
      Work work;
      if (!schedule.work(turn, blockIdx.x, gridDim.x, C::kQueries, &work)) continue;
      produce_tiles(work, span_of<C>(p, work), nullptr);
    }
  }
  copy_due_values();
  hand_out({-1, 0, 0, 0}, {}, nullptr);
}

// By one warp: which tiles of keys each tile of queries sees.
template <class C>
__device__ __forceinline__ void find_tiles(const Problem& p, const Plan& plan,
                                           const Schedule& schedule, const Shared<C>& shared) {
  const bool first_lane = threadIdx.x % 32 == 0;
  if (threadIdx.x % 32 < 2) shared.found(threadIdx.x % 2)->marks.owner = -1;
  uint32_t count = 0;
  for (int turn = 0; turn <= schedule.turns; ++turn) {
    Work work = {-1, 0, 0, 0};
    const int blocks = forgotten(gridDim.x);
    if (turn < schedule.turns && !schedule.work(turn, blockIdx.x, blocks, C::kQueries, &work))
      continue;
    const int owner = (p.mask.batch != 0 || p.key_lengths ? work.batch : 0) * int(p.q_heads) +
                      (p.mask.head != 0 ? work.head : 0);
    barrier_wait(shared.found_free(count % 2), count / 2 % 2 ^ 1);
    Item* const item = shared.found(count % 2);
    __syncwarp();
    const bool known = item->marks.owner == owner;
    __syncwarp();
    if (first_lane) item->work = work, item->marks.owner = owner;
    __syncwarp();
    if (!known && item->work.batch >= 0) find_marks<C>(p, plan, item->work, &item->marks);
    __syncwarp();
    if (first_lane && item->work.batch >= 0) {
      Span& span = item->span = span_of<C>(forgotten(p), item->work);
      const int last = last_visible(item->marks.visible, span.last_tile, span.first_tile);
      const bool all_hidden = last < span.first_tile && span.first_tile <= span.last_tile;
      span.last_tile = all_hidden ? span.first_tile : last;
      // Consumers see to the rows if all keys are hidden: they get a tile all the same.
      if (all_hidden) item->marks.visible[span.last_tile / 32] |= 1u << span.last_tile % 32;
      span.first_tile = first_visible(item->marks.visible, span.first_tile, span.last_tile);
    }
    barrier_arrive(shared.found_full(count++ % 2));
  }
}

// What the mask adds to the scores of each key of the stages of K, by two warps in turns: one needs
// longer for a tile than consumers do.
template <class C>
__device__ __forceinline__ void produce_biases(const Problem& p, const Plan& plan,
                                               const Shared<C>& shared) {
  constexpr int kPerLane = (C::kKeys + 31) / 32;
  const int lane = threadIdx.x % 32;
  Found<C> found(shared);
  Ring<C::kStages> ring;
  bool mine = threadIdx.x / 32 == 1;
  while (true) {
    const Item& item = *found.next();
    if (item.work.batch < 0) break;
    for (int tile = item.span.last_tile; tile >= item.span.first_tile;
         tile = last_visible(item.marks.visible, tile - 1, item.span.first_tile)) {
      if (mine) {
        const bool biased =
            C::kGeneral || tile >= kMarkedTiles || item.marks.biased[tile / 32] >> tile % 32 & 1;
        const int first = tile * C::kKeys + lane;
        const char* at = mask_element(p, plan, item.work.batch, item.work.head, 0, first);
        uint32_t bits[kPerLane];
#pragma unroll
        for (int i = 0; i < kPerLane; ++i, at += 32 * plan.mask_step) {
          bits[i] =
              biased && first + 32 * i < item.span.range.limit ? mask_bits(at, plan.mask_bytes) : 0;
        }
        float biases[kPerLane];
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) biases[i] = mask_bias(bits[i], p.mask_dtype);
        barrier_wait(shared.k_free(ring.stage), ring.round ^ 1);
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
          const int key = 32 * i + lane;
          if (biased && key < C::kKeys) shared.biases(ring.stage)[key] = biases[i];
        }
        if (lane == 0) *shared.biased(ring.stage) = biased;
        barrier_arrive(shared.k_full(ring.stage));
      }
      mine = !mine;
      ring.advance();
    }
    found.done();
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

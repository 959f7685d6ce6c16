// The producer warpgroup: one thread drives the copy engine, one warp looks ahead at a mask's
// marks.
#pragma once

#include "kernels/common/bias.cuh"
#include "kernels/common/overlap.cuh"
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
                                        const PackedMask& packed, const Shared<C>& shared) {
  prefetch(&maps.q), prefetch(&maps.k), prefetch(&maps.v);
  wait_for_predecessor();
  Ring<C::kQueryStages> queries;
  Ring<C::kStages> keys, values;
  Work values_of = {};
  int values_tile = -1;  // none is due
  const auto copy_due_values = [&] {
    if (values_tile < 0) return;
    barrier_wait(shared.v_free(values.stage), values.round ^ 1);
    if (!kMarked || is_elected_alone()) {
      copy_tile<C, C::kKeys, C::kValueBoxes>(shared.v(values.stage), &maps.v,
                                             shared.v_full(values.stage), values_tile * C::kKeys,
                                             values_of.kv_head, values_of.batch);
    }
    values.advance();
    values_tile = -1;
  };
  const auto hand_out = [&](const Work& work, const Span& span, const Marks* marks) {
    barrier_wait(shared.q_free(queries.stage), queries.round ^ 1);
    Item* const item = shared.item(queries.stage);
    item->work = work, item->span = span;
    if (kMarked && work.batch >= 0) {
      item->marks.row = marks->row;
      const int end = min(span.last_tile / 32 + 1, kMarkedTiles / 32);
      for (int i = span.first_tile / 32; i < end; ++i) {
        item->marks.visible[i] = marks->visible[i];
        item->marks.biased[i] = marks->biased[i];
      }
    }
    const uint32_t full =
        C::kBiased ? shared.q_landed(queries.stage) : shared.q_full(queries.stage);
    if (work.batch >= 0) {
      copy_tile<C, C::kQueries, C::kBoxes>(shared.q(queries.stage), &maps.q, full, work.first_query,
                                           work.head, work.batch);
    } else {
      barrier_arrive(full);
    }
    queries.advance();
  };
  // One thread runs this. To the compiler it is one of the threads that do, so that what it copies
  // needs no loop over lanes. What is run for each tile is kept short: an instruction of this warp
  // is one that consumers do not issue.
  const auto produce_seen = [&](const Item& item) {
    if (C::kQueryStages == 1) copy_due_values();
    constexpr int kBytes = C::kKeys * C::kBiasBytes;
    const int first_tile = item.span.first_tile, kv_head = item.work.kv_head;
    const int batch = item.work.batch;
    int tile = item.span.last_tile;
    const uint32_t first_in_row = item.marks.row.index * packed.key_tiles;
    while (tile >= first_tile) {
      const int end = tile - min(visible_run(item.marks, tile), tile - first_tile + 1);
      for (; tile > end; --tile) {
        barrier_wait(shared.k_free(keys.stage), keys.round ^ 1);
        const uint32_t full = shared.k_full(keys.stage);
        if (is_elected_alone()) {
          if (!C::kWeights && plan.mask_per_key) {
            barrier_expect(full, kBytes);
            copy_bytes(shared.bias_rows(keys.stage),
                       packed.tiles + int64_t{first_in_row + tile} * kBytes, kBytes, full);
          }
          copy_tile<C, C::kKeys, C::kBoxes>(shared.k(keys.stage), &maps.k, full, tile * C::kKeys,
                                            kv_head, batch);
        }
        keys.advance();
        if (tile == item.span.last_tile) hand_out(item.work, item.span, &item.marks);
        copy_due_values();
        values_of.kv_head = kv_head, values_of.batch = batch, values_tile = tile;
      }
      tile = last_visible(item.marks.visible, tile, first_tile);
    }
  };
  const auto produce_tiles = [&](const Work& work, const Span& span) {
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
      if (tile == span.last_tile) hand_out(work, span, nullptr);
      copy_due_values();
      values_of = work, values_tile = tile;
      --tile;
    }
  };
  if constexpr (kMarked) {
    Found<C> found(shared);
    while (found.next()->work.batch >= 0) {
      produce_seen(*found.next());
      found.done();
    }
  } else {
    for (int turn = 0; turn < schedule.turns; ++turn) {
      Work work;
      if (!schedule.work(turn, blockIdx.x, gridDim.x, C::kQueries, &work)) continue;
      produce_tiles(work, span_of<C>(p, work));
    }
  }
  copy_due_values();
  hand_out({-1, 0, 0, 0}, {}, nullptr);
}

// By one thread: the weights of masked tiles, for each group as soon as it has done with those
// before.
template <class C>
__device__ __forceinline__ void produce_weights(const PackedMask& packed, const Shared<C>& shared) {
  Found<C> found(shared);
  uint32_t round = 0;
  while (found.next()->work.batch >= 0) {
    const Item& item = *found.next();
    const int64_t row = int64_t{item.marks.row.index} * packed.key_tiles;
    int tile = item.span.last_tile;
    while (tile >= item.span.first_tile) {
      if (is_biased(item.marks, tile)) {
        const unsigned char* const from =
            packed.tiles + (row + tile) * C::kGroups * C::kWeightBytes;
        for (int group = 0; group < C::kGroups; ++group) {
          barrier_wait(shared.w_free(group), round ^ 1);
          barrier_arrive_expecting(shared.w_full(group), C::kWeightBytes);
          copy_bytes(shared.weights(group), from + group * C::kWeightBytes, C::kWeightBytes,
                     shared.w_full(group));
        }
        round ^= 1;
      }
      tile = last_visible(item.marks.visible, tile - 1, item.span.first_tile);
    }
    found.done();
  }
}

// By one warp: which tiles of keys each tile of queries sees.
template <class C>
__device__ __forceinline__ void find_tiles(const Problem& p, const Plan& plan,
                                           const Schedule& schedule, const PackedMask& packed,
                                           const Shared<C>& shared) {
  const bool first_lane = threadIdx.x % 32 == 0;
  uint32_t count = 0;
  for (int turn = 0; turn <= schedule.turns; ++turn) {
    Work work = {-1, 0, 0, 0};
    const int blocks = forgotten(gridDim.x);
    // Where rows differ, so that no block gets the longest tile of each head.
    const int block = plan.mask_per_key ? blockIdx.x : (blockIdx.x + turn / 2 * 37) % blocks;
    if (turn < schedule.turns && !schedule.work(turn, block, blocks, C::kQueries, &work)) continue;
    // It is a tile of queries ahead, and looking there all the time would cost consumers 5 %.
    barrier_wait_long(shared.found_free(count % 2), count / 2 % 2 ^ 1);
    Item* const item = shared.found(count % 2);
    __syncwarp();
    if (first_lane) {
      item->work = work;
      item->marks.row = {static_cast<uint32_t>(packed.row_of(p, work, C::kQueries))};
    }
    if (work.batch >= 0) {
      Span span = span_of<C>(forgotten(p), work);
      const bool calm = copy_marks<C>(p, packed, work, span, &item->marks);
      __syncwarp();
      const int last = last_visible(item->marks.visible, span.last_tile, span.first_tile);
      const bool all_hidden = last < span.first_tile && span.first_tile <= span.last_tile;
      span.last_tile = all_hidden ? span.first_tile : last;
      __syncwarp();
      // Consumers see to the rows if all keys are hidden: they get a tile all the same.
      if (all_hidden && first_lane)
        item->marks.visible[span.last_tile / 32] |= 1u << span.last_tile % 32;
      __syncwarp();
      span.first_tile = first_visible(item->marks.visible, span.first_tile, span.last_tile);
      if (first_lane) {
        item->span = span;
        item->marks.row.steady =
            calm && !all_hidden && sees_alike<C>(forgotten(p), work, span.range, last);
      }
      compare_marks(&item->marks, span.first_tile, span.last_tile);
    }
    barrier_arrive(shared.found_full(count++ % 2));
  }
}

// The rows of tiles that see no key, by one warp. Consumers do not hear of them: such tiles would
// take the places of queries while others wait for these.
template <class T, class C>
__device__ __forceinline__ void store_empty_tiles(const Problem& p, const Schedule& schedule) {
  wait_for_predecessor();
  for (int turn = 0; turn < schedule.turns; ++turn) {
    Work work;
    if (!schedule.work(turn, blockIdx.x, gridDim.x, C::kQueries, &work)) continue;
    const Span span = span_of<C>(p, work);
    if (span.first_tile <= span.last_tile) continue;
    const int lane = (C::kMarks ? threadIdx.x : forgotten(threadIdx.x)) & 31;
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

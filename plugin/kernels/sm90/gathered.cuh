// Ragged batches and pages: which tile of queries is next, and what the producer does about it.
//
// Lengths are on the device alone, so tiles are not dealt out but drawn: a number in memory, 0
// before the launch, counts those that were taken. Which block has a tile changes nothing in it.
#pragma once

#include "kernels/sm90/gathering.h"
#include "kernels/sm90/producer.cuh"

namespace flashonnx::sm90 {

// Tiles are numbered sequence by sequence, and section of heads by section of heads in it: first
// the same tile of all heads of a section, whose K and V share the L2 cache. Sequences of few keys
// come last, so that blocks end together. A warp finds the tile of a number; each lane knows how
// many there are up to the end of its part of the batch.
template <class C>
class Draw {
 public:
  __device__ __forceinline__ Draw(const Problem& p, const Gathering& gathering)
      : p_(p), gathering_(gathering) {
    int longest = 0;
    for (int i = 0; i < gathering_.part; ++i) {
      const int sequence = lane() * gathering_.part + i;
      if (sequence < gathering_.sequences) longest = max(longest, sequence_of(p_, sequence).keys);
    }
    few_keys_ = __reduce_max_sync(0xffffffffu, longest) / 4;
    int tiles[2] = {};
    for (int i = 0; i < gathering_.part; ++i) {
      tiles[0] += tiles_of(lane() * gathering_.part + i, false);
      tiles[1] += tiles_of(lane() * gathering_.part + i, true);
    }
    end_[0] = sum_of_lanes(tiles[0]);
    first_of_few_ = __shfl_sync(0xffffffffu, end_[0], 31);
    end_[1] = first_of_few_ + sum_of_lanes(tiles[1]);
  }

  // False if there are not so many.
  __device__ __forceinline__ bool find(const Plan& plan, uint32_t number, Work* work) const {
    const int wanted = plan.q_heads.quotient(number);
    const bool few = wanted >= first_of_few_;
    const int end_of_part = few ? end_[1] : end_[0];
    const int part = __popc(__ballot_sync(0xffffffffu, end_of_part <= wanted));
    if (part == 32) return false;
    const int before = __shfl_sync(0xffffffffu, end_of_part, (part + 31) % 32);
    int begin = part > 0 ? before : few ? first_of_few_ : 0;
    int sequence = part * gathering_.part, tiles = 0;
    while (true) {  // over the sequences of that lane, 32 at a time
      const int mine = tiles_of(sequence + lane(), few);
      const int end = begin + sum_of_lanes(mine);
      const int found = __popc(__ballot_sync(0xffffffffu, end <= wanted));
      const int behind = __shfl_sync(0xffffffffu, end, (found + 31) % 32);
      if (found > 0) begin = behind;
      sequence += found;
      if (found == 32) continue;
      tiles = __shfl_sync(0xffffffffu, mine, found);
      break;
    }
    uint32_t rest = number - begin * plan.q_heads.divisor;
    const uint32_t section = rest / (tiles * gathering_.section.divisor);
    rest -= section * tiles * gathering_.section.divisor;
    const int tile = gathering_.section.quotient(rest);
    work->batch = sequence;
    work->head = section * gathering_.section.divisor + gathering_.section.rest(rest);
    work->kv_head = plan.group.quotient(work->head);
    work->first_query = (plan.longest_last ? tiles - 1 - tile : tile) * C::kQueries;
    return true;
  }

 private:
  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }

  // Of a sequence of few keys, or of many.
  __device__ __forceinline__ int tiles_of(int index, bool few) const {
    if (index >= gathering_.sequences) return 0;
    const Sequence sequence = sequence_of(p_, index);
    if ((sequence.keys <= few_keys_) != few) return 0;
    return (sequence.queries + C::kQueries - 1) / C::kQueries;
  }

  // Of lanes up to this one.
  __device__ __forceinline__ static int sum_of_lanes(int x) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, x, step);
      if (lane() >= step) x += other;
    }
    return x;
  }

  const Problem& p_;
  const Gathering& gathering_;
  int few_keys_, first_of_few_;
  int end_[2];
};

// Whether a page of the first `keys` keys is missing. By a warp.
__device__ __forceinline__ bool misses_pages(const Pages& pages, int64_t batch, int keys) {
  const int count = keys > 0 ? pages.size.quotient(keys - 1) + 1 : 0;
  bool missing = false;
#pragma unroll 4
  for (int i = threadIdx.x % 32; i < count; i += 32) {
    const int32_t page = pages.table[batch * pages.table_batch + i * pages.table_page];
    missing |= static_cast<uint32_t>(page) >= pages.count;
  }
  return __any_sync(0xffffffffu, missing);
}

// By a warp of its own, so that nothing waits for it: draws the next tile while the producer is at
// the one before, not sooner, as another block may be done by then. The rows of tiles that see no
// key are stored here.
template <class T, class C>
__device__ __forceinline__ void draw_tiles(const Problem& p, const Plan& plan,
                                           const Gathering& gathering, const Shared<C>& shared) {
  const int lane = threadIdx.x % 32;
  const auto hand_over = [&](const Drawn& drawn) {
    if (lane != 0) return;
    *shared.drawn() = drawn;
    barrier_arrive(shared.drawn_full());
  };
  const Draw<C> draw(p, gathering);
  Work work;
  int known = -1;        // the sequence of which is known whether
  bool missing = false;  // it misses pages
  uint32_t round = 0;
  uint32_t number = blockIdx.x;
  while (draw.find(plan, number, &work)) {
    const Sequence sequence = sequence_of(p, work.batch);
    const Span span = span_of<C>(p, work, sequence);
    if (span.first_tile > span.last_tile) {
      store_empty_rows<T, C>(p, work, sequence.first_query,
                             min(work.first_query + C::kQueries, sequence.queries));
    } else {
      if (p.pages.table && work.batch != known) {
        known = work.batch;
        missing = misses_pages(p.pages, work.batch, span.range.limit);
      }
      hand_over({{work, span, sequence.queries, sequence.first_query, missing},
                 p.ragged.keys ? 0 : work.batch,
                 sequence.first_key});
      barrier_wait(shared.drawn_free(), round);
      round ^= 1;
    }
    if (lane == 0) number = gridDim.x + atomicAdd(gathering.drawn, 1u);
    number = __shfl_sync(0xffffffffu, number, 0);
  }
  hand_over({{{-1, 0, 0, 0}, {}, 0, 0, 0}, 0, 0});
}

// The producer's first warp: `produce` for gathered problems. Each lane copies its rows of a tile
// of K or V, a page's at most; without pages, the first lane copies all.
template <class C>
__device__ __forceinline__ void produce_gathered(const Problem& p, const Gathering& gathering,
                                                 const Maps& maps, const Shared<C>& shared) {
  struct Place {  // of the lane's rows; outer < 0: there is nothing
    int row, outer;
  };
  const int lane = threadIdx.x % 32;
  const int first_row = lane * gathering.rows.divisor;
  const bool copies = first_row < C::kKeys;
  const bool paged = p.pages.table != nullptr;
  prefetch(&maps.q), prefetch(&maps.k), prefetch(&maps.v);
  Ring<C::kQueryStages> queries;
  Ring<C::kStages> keys, values;
  int values_head = -1;  // none are due
  Place values_place = {};

  const auto copy = [&](uint32_t tile, const CUtensorMap* map, uint32_t full, Place place,
                        int head) {
    if (lane == 0) barrier_arrive_expecting(full, C::kKeyBytes);
    __syncwarp();
    if (!copies) return;
#pragma unroll
    for (int box = 0; box < C::kBoxes; ++box) {
      copy_box(tile + (box * C::kKeys + first_row) * C::kBoxRow, map, full, box * C::kBox,
               place.row, head, place.outer);
    }
  };
  const auto copy_due_values = [&] {
    if (values_head < 0) return;
    barrier_wait(shared.v_free(values.stage), values.round ^ 1);
    copy(shared.v(values.stage), &maps.v, shared.v_full(values.stage), values_place, values_head);
    values.advance();
    values_head = -1;
  };
  const auto hand_out = [&](const Item& item) {
    barrier_wait(shared.q_free(queries.stage), queries.round ^ 1);
    if (lane == 0) {
      *shared.item(queries.stage) = item;
      const uint32_t full = shared.q_full(queries.stage);
      const Work& work = item.work;
      if (work.batch >= 0) {
        copy_tile<C, C::kQueries>(shared.q(queries.stage), &maps.q, full,
                                  item.token + work.first_query, work.head,
                                  p.ragged.queries ? 0 : work.batch);
      } else {
        barrier_arrive(full);
      }
    }
    queries.advance();
  };
  // What a missing page adds to the scores of its keys, with K.
  const auto store_biases = [&](uint32_t missing) {
    if (C::kGeneral || missing != 0) {
      for (int key = lane; key < C::kKeys; key += 32) {
        const bool gone = missing >> gathering.rows.quotient(key) & 1;
        shared.biases(keys.stage)[key] = gone ? -INFINITY : 0.f;
      }
    }
    if (lane == 0) *shared.biased(keys.stage) = missing != 0;
    __syncwarp();
  };

  const Drawn& drawn = *shared.drawn();
  uint32_t round = 0;
  while (true) {
    barrier_wait(shared.drawn_full(), round);
    round ^= 1;
    const int batch = drawn.item.work.batch;
    if (batch < 0) break;
    if (C::kQueryStages == 1) copy_due_values();
    const int head = drawn.item.work.kv_head, limit = drawn.item.span.range.limit;
    const int first_key = drawn.first_key, outer = drawn.outer;
    const int first_tile = drawn.item.span.first_tile, last_tile = drawn.item.span.last_tile;
#pragma unroll 1
    for (int tile = last_tile; tile >= first_tile; --tile) {
      const int key = tile * C::kKeys + first_row;
      const bool there = copies && key < limit;
      Place place = {first_key + key, outer};
      if (paged) {
        const Slot slot = there ? slot_of(p.pages, batch, key) : Slot{-1, 0};
        place = {slot.slot, slot.page};
      }
      barrier_wait(shared.k_free(keys.stage), keys.round ^ 1);
      if (paged) store_biases(__ballot_sync(0xffffffffu, there && place.outer < 0));
      copy(shared.k(keys.stage), &maps.k, shared.k_full(keys.stage), place, head);
      keys.advance();
      if (tile == last_tile) {
        hand_out(drawn.item);
        __syncwarp();
        if (lane == 0) barrier_arrive(shared.drawn_free());
      }
      copy_due_values();
      values_place = place, values_head = head;
    }
  }
  copy_due_values();
  hand_out(drawn.item);
}

}  // namespace flashonnx::sm90

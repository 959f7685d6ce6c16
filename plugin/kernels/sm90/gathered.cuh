// Ragged batches and pages: which tile of queries is next, and what the producer does about it.
//
// Lengths are on the device alone, so tiles are not dealt out but drawn: a number in memory, 0
// before the launch, counts those that were taken. Which block has a tile changes nothing in it.
#pragma once

#include "kernels/sm90/gathering.h"
#include "kernels/sm90/producer.cuh"

namespace flashonnx::sm90 {

// Tiles are numbered sequence by sequence, and section of heads by section of heads in it: first
// the same tile of all heads of a section, whose K and V share the L2 cache. A warp finds the tile
// of a number; each lane knows how many there are up to the end of its part of the batch.
template <class C>
class Draw {
 public:
  __device__ __forceinline__ Draw(const Problem& p, const Gathering& gathering)
      : p_(p), gathering_(gathering) {
    int tiles = 0;
    for (int i = 0; i < gathering_.part; ++i) tiles += tiles_of(lane() * gathering_.part + i);
    end_ = sum_of_lanes(tiles);
  }

  // False if there are not so many.
  __device__ __forceinline__ bool find(const Plan& plan, uint32_t number, Work* work) const {
    const int wanted = plan.q_heads.quotient(number);
    const int part = __popc(__ballot_sync(0xffffffffu, end_ <= wanted));
    if (part == 32) return false;
    const int before = __shfl_sync(0xffffffffu, end_, (part + 31) % 32);
    int begin = part > 0 ? before : 0, sequence = part * gathering_.part, tiles = 0;
    while (true) {  // over the sequences of that lane, 32 at a time
      const int mine = tiles_of(sequence + lane());
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

  __device__ __forceinline__ int tiles_of(int sequence) const {
    if (sequence >= gathering_.sequences) return 0;
    int queries = p_.q_length;
    if (const int32_t* first = p_.ragged.queries)
      queries = min(first[sequence + 1] - first[sequence], queries);
    return (queries + C::kQueries - 1) / C::kQueries;
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
  int end_;
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

// The producer's first warp: `produce` for gathered problems. Each lane copies its rows of a tile
// of K or V, a page's at most; without pages, the first lane copies all.
template <class T, class C>
__device__ __forceinline__ void produce_gathered(const Problem& p, const Plan& plan,
                                                 const Gathering& gathering, const Maps& maps,
                                                 const Shared<C>& shared) {
  struct Place {  // of the lane's rows; outer < 0: there is nothing
    int row, outer;
  };
  const int lane = threadIdx.x % 32;
  const int first_row = lane * gathering.rows.divisor;
  const bool copies = first_row < C::kKeys;
  const bool paged = p.pages.table != nullptr;
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
      if (item.work.batch >= 0) {
        copy_tile<C, C::kQueries>(shared.q(queries.stage), &maps.q, full,
                                  item.token + item.work.first_query, item.work.head,
                                  p.ragged.queries ? 0 : item.work.batch);
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

  const Draw<C> draw(p, gathering);
  Work work;
  int known = -1;        // the sequence of which is known whether
  bool missing = false;  // it misses pages
  uint32_t next;
  for (uint32_t number = blockIdx.x; draw.find(plan, number, &work);
       number = gridDim.x + __shfl_sync(0xffffffffu, next, 0)) {
    if (lane == 0) next = atomicAdd(gathering.drawn, 1u);
    const Sequence sequence = sequence_of(p, work.batch);
    const Span span = span_of<C>(p, work, sequence);
    if (C::kQueryStages == 1 || span.first_tile > span.last_tile) copy_due_values();
    if (span.first_tile > span.last_tile) {
      store_empty_rows<T, C>(p, work, sequence.first_query,
                             min(work.first_query + C::kQueries, sequence.queries));
      continue;
    }
    if (paged && work.batch != known) {
      known = work.batch;
      missing = misses_pages(p.pages, work.batch, span.range.limit);
    }
    for (int tile = span.last_tile; tile >= span.first_tile; --tile) {
      const int key = tile * C::kKeys + first_row;
      Place place = {sequence.first_key + key, p.ragged.keys ? 0 : work.batch};
      const bool there = copies && key < span.range.limit;
      if (paged) {
        const Slot slot = there ? slot_of(p.pages, work.batch, key) : Slot{-1, 0};
        place = {slot.slot, slot.page};
      }
      barrier_wait(shared.k_free(keys.stage), keys.round ^ 1);
      if (paged) store_biases(__ballot_sync(0xffffffffu, there && place.outer < 0));
      copy(shared.k(keys.stage), &maps.k, shared.k_full(keys.stage), place, work.kv_head);
      keys.advance();
      if (tile == span.last_tile)
        hand_out({work, span, sequence.queries, sequence.first_query, missing});
      copy_due_values();
      values_place = place, values_head = work.kv_head;
    }
  }
  copy_due_values();
  hand_out({{-1, 0, 0, 0}, {}, 0, 0, 0});
}

}  // namespace flashonnx::sm90

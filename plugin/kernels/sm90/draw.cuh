// Ragged batches and pages: which tile of queries is next.
//
// Lengths are on the device alone, so tiles are not dealt out but drawn: a number in memory, 0
// before the launch, counts those that were taken. Which block has a tile changes nothing in it.
#pragma once

#include "kernels/common/overlap.cuh"
#include "kernels/sm90/epilogue.cuh"
#include "kernels/sm90/gathering.h"
#include "kernels/sm90/shared.cuh"

namespace flashonnx::sm90 {

// As `sequence_of`, where lengths are numbers in the workspace: see resolve.h.
__device__ __forceinline__ Sequence gathered_sequence(const Problem& p, int batch) {
  Sequence sequence = {0, 0, p.q_length, 0, p.q_length};
  if (const int32_t* const first = p.ragged.queries) {
    sequence.first_query = first[batch];
    sequence.length = first[batch + 1] - first[batch];
    sequence.queries = min(sequence.length, p.q_length);
  }
  if (const int32_t* const first = p.ragged.keys) {
    sequence.first_key = first[batch];
    sequence.keys = min(first[batch + 1] - first[batch], p.key_length);
  } else {
    sequence.keys = static_cast<const int32_t*>(p.key_lengths)[batch];
  }
  return sequence;
}

// Tiles are numbered sequence by sequence, and section of heads by section of heads in it: first
// the same tile of all heads of a section, whose K and V share the L2 cache. Sequences of few keys
// come last, so that blocks end together. A warp finds the tile of a number; each lane knows how
// many there are up to the end of its part of the batch.
template <class C>
class Draw {
 public:
  __device__ __forceinline__ Draw(const Problem& p, const Gathering& gathering)
      : p_(p), gathering_(gathering) {
    int longest = 0, tiles[2] = {};
#pragma unroll 1  // a launch begins with this, and code that is not there yet takes long to come
    for (int i = 0; i < gathering_.part; ++i) {
      const int sequence = lane() * gathering_.part + i;
      if (sequence < gathering_.sequences)
        longest = max(longest, gathered_sequence(p_, sequence).keys);
    }
    few_keys_ = __reduce_max_sync(0xffffffffu, longest) / 4;
#pragma unroll 1
    for (int i = 0; i < gathering_.part; ++i) {
      bool few;
      const int count = tiles_of(lane() * gathering_.part + i, &few);
      tiles[0] += few ? 0 : count, tiles[1] += few ? count : 0;
    }
    end_[0] = sum_of_lanes(tiles[0]);
    end_[1] = sum_of_lanes(tiles[1]);
    first_of_few_ = __shfl_sync(0xffffffffu, end_[0], 31);
    end_[1] += first_of_few_;
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
    int tiles = __shfl_sync(0xffffffffu, end_of_part, part) - begin;
    int sequence = part * gathering_.part;
    while (gathering_.part > 1) {  // over the sequences of that lane, 32 at a time
      bool is_few;
      const int count = tiles_of(sequence + lane(), &is_few), mine = is_few == few ? count : 0;
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

  // Of a sequence, and whether it has few keys.
  __device__ __forceinline__ int tiles_of(int index, bool* few) const {
    *few = false;
    if (index >= gathering_.sequences) return 0;
    const Sequence sequence = gathered_sequence(p_, index);
    *few = sequence.keys <= few_keys_;
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
  int end_[2];  // of sequences of many keys, and of few
};

// What the producer's warps tell each other: a tile that was drawn.
struct alignas(16) Drawn {
  GatheredItem item;
  int32_t outer;      // batch entry of K and V, of which there is one if they are ragged
  int32_t first_key;  // row of its first key
};

// Places of two of them, in turns.
template <class C>
struct DrawnPlaces {
  const Shared<C>& shared;

  __device__ __forceinline__ Drawn& drawn(uint32_t count) const {
    static_assert(sizeof(Drawn) == 64);
    return reinterpret_cast<Drawn*>(shared.memory + C::kDrawnAt)[count % 2];
  }
  // There is one; it was taken, for its queries, its keys and its values.
  __device__ __forceinline__ void wait_full(uint32_t count) const {
    barrier_wait(full(count), count / 2 % 2);
  }
  // By all lanes, as all have read it.
  __device__ __forceinline__ void take(uint32_t count) const { barrier_arrive(taken(count)); }
  __device__ __forceinline__ void wait_taken(uint32_t count) const {
    barrier_wait(taken(count), count / 2 % 2);
  }
  __device__ __forceinline__ uint32_t full(uint32_t count) const {
    return shared.base + C::kDrawnAt + 2 * sizeof(Drawn) + count % 2 * 8;
  }
  __device__ __forceinline__ uint32_t taken(uint32_t count) const { return full(count) + 16; }
  // Queries have landed that consumers do not hear of yet.
  __device__ __forceinline__ uint32_t landed() const { return full(0) + 32; }

  __device__ __forceinline__ void init_barriers() const {
    for (int place = 0; place < 2; ++place) {
      barrier_init(full(place), 1), barrier_init(taken(place), 3 * 32);
    }
    barrier_init(landed(), 1);
    fence_barrier_init();
  }
};

template <class C>
__device__ __forceinline__ Span span_of(const Problem& p, const Work& work,
                                        const Sequence& sequence) {
  Span span;
  span.range = key_range(p, sequence.length, sequence.keys);
  const int begin = span.range.lower(work.first_query);
  const int end = span.range.upper(min(work.first_query + C::kQueries, sequence.queries) - 1);
  span.first_tile = begin / C::kKeys;
  span.last_tile = begin < end ? (end - 1) / C::kKeys : span.first_tile - 1;
  return span;
}

// Queries [work.first_query, end), which see no key, by one warp.
template <class T, class C>
__device__ __forceinline__ void store_empty_rows(const Problem& p, const Work& work, int token,
                                                 int end) {
  const int lane = threadIdx.x % 32;
  const float zeros[C::kDim / 32] = {};
#pragma unroll 1
  for (int query = work.first_query; query < end; ++query) {
    store_row<C>(p, work, token + query, lane, 1.f, zeros);
    if (lane == 0) store_lse(p, work, token + query, -INFINITY);
  }
}

// By a warp of its own, so that nothing waits for it: draws the next tile while the producer is at
// the one before, not sooner, as another block may be done by then; but two tiles ahead if they are
// so short that the producer would wait. The rows of tiles that see no key are stored here.
template <class T, class C>
__device__ __forceinline__ void draw_tiles(const Problem& p, const Plan& plan,
                                           const Gathering& gathering, const Shared<C>& shared) {
  constexpr int kLong = 4;  // tiles of keys, which take as long as to draw the next
  const int lane = threadIdx.x % 32;
  const DrawnPlaces<C> places = {shared};
  uint32_t count = 0;
  const auto hand_over = [&](const Drawn& drawn) {
    if (count >= 2) places.wait_taken(count - 2);
    if (lane == 0) {
      places.drawn(count) = drawn;
      barrier_arrive(places.full(count));
    }
    ++count;
  };
  wait_for_predecessor();  // which puts lengths in order, or writes to the cache
  const Draw<C> draw(p, gathering);
  Work work;
  uint32_t number = blockIdx.x;
  while (draw.find(plan, number, &work)) {
    const Sequence sequence = gathered_sequence(p, work.batch);
    const Span span = span_of<C>(p, work, sequence);
    if (span.first_tile > span.last_tile) {
      store_empty_rows<T, C>(p, work, sequence.first_query,
                             min(work.first_query + C::kQueries, sequence.queries));
    } else {
      hand_over({{work, span, sequence.queries, sequence.first_query, 0},
                 p.ragged.keys ? 0 : work.batch,
                 sequence.first_key});
      if (span.last_tile - span.first_tile + 1 >= kLong) places.wait_taken(count - 1);
    }
    if (lane == 0) number = gridDim.x + atomicAdd(gathering.drawn, 1u);
    number = __shfl_sync(0xffffffffu, number, 0);
  }
  hand_over({{{-1, 0, 0, 0}, {}, 0, 0, 0}, 0, 0});
}

}  // namespace flashonnx::sm90

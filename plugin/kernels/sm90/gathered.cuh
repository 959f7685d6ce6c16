// Ragged batches and pages: which tile of queries is next, and what the producer does about it.
//
// Lengths are on the device alone, so tiles are not dealt out but drawn: a number in memory, 0
// before the launch, counts those that were taken. Which block has a tile changes nothing in it.
#pragma once

#include "kernels/common/overlap.cuh"
#include "kernels/sm90/consumer.cuh"
#include "kernels/sm90/gathering.h"

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
    int longest = 0, tiles[2] = {};
#pragma unroll 1  // a launch begins with this, and code that is not there yet takes long to come
    for (int i = 0; i < gathering_.part; ++i) {
      const int sequence = lane() * gathering_.part + i;
      if (sequence < gathering_.sequences) longest = max(longest, sequence_of(p_, sequence).keys);
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
    const Sequence sequence = sequence_of(p_, index);
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
  // None: zeros.
  __device__ __forceinline__ Drawn& blank() const { return (&drawn(0))[2]; }
  // There is one; it was taken, for its queries, its keys and its values.
  __device__ __forceinline__ void wait_full(uint32_t count) const {
    barrier_wait(full(count), count / 2 % 2);
  }
  __device__ __forceinline__ void take(uint32_t count) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(taken(count));
  }
  __device__ __forceinline__ void wait_taken(uint32_t count) const {
    barrier_wait(taken(count), count / 2 % 2);
  }
  __device__ __forceinline__ uint32_t full(uint32_t count) const {
    return shared.base + C::kDrawnAt + 3 * sizeof(Drawn) + count % 2 * 8;
  }
  __device__ __forceinline__ uint32_t taken(uint32_t count) const { return full(count) + 16; }
  // Queries have landed that consumers do not hear of yet.
  __device__ __forceinline__ uint32_t landed() const { return full(0) + 32; }

  __device__ __forceinline__ void init_barriers() const {
    for (int place = 0; place < 2; ++place) {
      barrier_init(full(place), 1), barrier_init(taken(place), 3);
    }
    barrier_init(landed(), 1);
    blank() = {};
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
  int known = -1;        // the sequence of which is known whether
  bool missing = false;  // it misses pages
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
      if (span.last_tile - span.first_tile + 1 >= kLong) places.wait_taken(count - 1);
    }
    if (lane == 0) number = gridDim.x + atomicAdd(gathering.drawn, 1u);
    number = __shfl_sync(0xffffffffu, number, 0);
  }
  hand_over({{{-1, 0, 0, 0}, {}, 0, 0, 0}, 0, 0});
}

// One lane of a warp, in which all lanes are. The compiler knows that it is one, and what it copies
// needs no loop over lanes.
__device__ __forceinline__ bool is_elected() {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred one;\n"
      "elect.sync _|one, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, one;\n"
      "}\n"
      : "=r"(elected));
  return elected != 0;
}

// Copies tiles of K, or of V, of one tile of queries after another: a warp for each, the same code.
// Its lanes look up the pages of a tile, a box of the copy engine each, and one of them copies.
template <class C>
class Gatherer {
 public:
  __device__ __forceinline__ Gatherer(const Problem& p, const Gathering& gathering,
                                      const CUtensorMap& map, const Shared<C>& shared)
      : p_(p), gathering_(gathering), map_(map), shared_(shared) {
    prefetch(&map);
  }

  // Waits for the next tile of queries; false if there is none.
  __device__ __forceinline__ bool next() {
    const DrawnPlaces<C> places = {shared_};
    if (!rehearses_) places.wait_full(count_);
    const Drawn& drawn = rehearses_ ? places.blank() : places.drawn(count_);
    batch_ = drawn.item.work.batch;
    head_ = drawn.item.work.kv_head;
    limit_ = drawn.item.span.range.limit;
    first_tile_ = drawn.item.span.first_tile;
    tile_ = drawn.item.span.last_tile;
    first_key_ = drawn.first_key;
    outer_ = drawn.outer;
    biased_ = drawn.item.biased;
    if (!rehearses_) places.take(count_++);
    if (batch_ < 0) return false;
    look_up();
    return true;
  }

  // Copies the tile of keys at hand, and goes on to the next; false if there is none.
  __device__ __forceinline__ bool copy(uint32_t to, uint32_t full) {
    // The same in all lanes, told to the compiler.
    to = __shfl_sync(0xffffffffu, to, 0);
    full = __shfl_sync(0xffffffffu, full, 0);
    if (is_elected() && !rehearses_) barrier_arrive_expecting(full, C::kKeyBytes);
#pragma unroll 1
    for (int i = 0; i * gathering_.rows.divisor < C::kKeys; ++i) {
      const int row = __shfl_sync(0xffffffffu, row_, i);
      const int place = __shfl_sync(0xffffffffu, place_, i);
      if (is_elected() && !rehearses_) copy_row(to, full, row, place);
      to += gathering_.rows.divisor * C::kBoxRow;
    }
    if (--tile_ < first_tile_) return false;
    look_up();
    return true;
  }

  // True once: a launch begins with a tile that is not copied, which brings the code to where it
  // runs while the first one is being found.
  __device__ __forceinline__ bool rehearsed() {
    const bool was = rehearses_;
    rehearses_ = false;
    return was;
  }

  // Whether pages are missing, of any of the keys; bit i: that of box i.
  __device__ __forceinline__ bool biased() const { return biased_; }
  __device__ __forceinline__ uint32_t missing() const { return missing_; }

 private:
  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ int box_row() const { return lane() * gathering_.rows.divisor; }
  __device__ __forceinline__ int key() const { return tile_ * C::kKeys + box_row(); }

  // The boxes that begin at this row of the tile.
  __device__ __forceinline__ void copy_row(uint32_t to, uint32_t full, int row, int place) const {
#pragma unroll
    for (int box = 0; box < C::kBoxes; ++box) {
      copy_box(to + box * C::kKeys * C::kBoxRow, &map_, full, box * C::kBox, row, head_, place);
    }
  }

  // Where the lane's box begins, before it is time to copy it. Outside the tensor there are zeros.
  __device__ __forceinline__ void look_up() {
    row_ = first_key_ + key(), place_ = outer_;
    if (p_.pages.table) {
      const bool there = key() < limit_ && box_row() < C::kKeys;
      const Slot slot = there ? slot_of(p_.pages, batch_, key()) : Slot{-1, 0};
      row_ = slot.slot, place_ = slot.page;
      missing_ = __ballot_sync(0xffffffffu, there && place_ < 0);
    }
  }

  const Problem& p_;
  const Gathering& gathering_;
  const CUtensorMap& map_;
  const Shared<C>& shared_;
  uint32_t count_ = 0;  // of tiles of queries
  bool rehearses_ = true;
  int batch_, head_, limit_, first_tile_, tile_, first_key_, outer_;
  int row_, place_;  // of the lane's box: in its page or among all keys; its page or batch entry
  bool biased_;
  uint32_t missing_;
};

// What a missing page adds to the scores of its keys.
template <class C>
__device__ __forceinline__ void store_biases(const Gathering& gathering, const Shared<C>& shared,
                                             int stage, uint32_t missing) {
  const int lane = threadIdx.x % 32;
  if (missing != 0) {
#pragma unroll 1  // rare, and registers are few
    for (int key = lane; key < C::kKeys; key += 32) {
      const bool gone = missing >> gathering.rows.quotient(key) & 1;
      shared.biases(stage)[key] = gone ? -INFINITY : 0.f;
    }
  }
  if (lane == 0) *shared.biased(stage) = missing != 0;
  __syncwarp();
}

template <class C>
__device__ __forceinline__ void copy_queries(const Maps& maps, const Shared<C>& shared,
                                             const GatheredItem& item, int stage, uint32_t barrier,
                                             int batch) {
#pragma unroll
  for (int box = 0; box < C::kBoxes; ++box) {
    copy_box(shared.q(stage) + box * C::kQueries * C::kBoxRow, &maps.q, barrier, box * C::kBox,
             item.token + item.work.first_query, item.work.head, batch);
  }
}

// Copies a tile of queries that ends within a sequence. The next one's, which follow, become zeros
// before consumers see them, so that they change nothing.
template <class C>
__device__ __forceinline__ void copy_last_queries(const Maps& maps, const Shared<C>& shared,
                                                  const GatheredItem& item, int stage,
                                                  uint32_t round) {
  const int lane = threadIdx.x % 32;
  const uint32_t there = DrawnPlaces<C>{shared}.landed();
  if (lane == 0) {
    barrier_arrive_expecting(there, C::kQueryBytes);
    copy_queries<C>(maps, shared, item, stage, there, 0);
  }
  barrier_wait(there, round);
  constexpr int kChunks = C::kBoxRow / 16;
  const int end = item.queries - item.work.first_query;
#pragma unroll 1
  for (int row = end + lane / kChunks; row < C::kQueries; row += 32 / kChunks) {
#pragma unroll
    for (int box = 0; box < C::kBoxes; ++box) {
      const uint32_t at =
          shared.q(stage) + (box * C::kQueries + row) * C::kBoxRow + lane % kChunks * 16;
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
    }
  }
  fence_async();
  __syncwarp();
}

// Keys or values.
template <class C>
__device__ __forceinline__ void produce_rows(const Problem& p, const Gathering& gathering,
                                             const Maps& maps, const Shared<C>& shared,
                                             bool values) {
  static_assert(C::kKeyBytes == C::kValueBytes);
  Gatherer<C> gatherer(p, gathering, values ? maps.v : maps.k, shared);
  const uint32_t rows = values ? shared.v(0) : shared.k(0);
  const uint32_t barriers = values ? shared.v_full(0) : shared.k_full(0);
  const uint32_t next = shared.k_full(1) - shared.k_full(0), free = next / 2;
  Ring<C::kStages> ring;
  while (gatherer.next()) {
    bool more = true;
    while (more) {
      const uint32_t full = barriers + ring.stage * next;
      barrier_wait(full + free, ring.round ^ 1);
      if (!values && gatherer.biased())
        store_biases<C>(gathering, shared, ring.stage, gatherer.missing());
      more = gatherer.copy(rows + ring.stage * C::kKeyBytes, full);
      if (gatherer.rehearsed()) {
        wait_for_predecessor();
        break;
      }
      ring.advance();
    }
  }
}

// Queries, and what is to be done with them, as early as there is a place: they come from far.
template <class C>
__device__ __forceinline__ void produce_queries(const Problem& p, const Maps& maps,
                                                const Shared<C>& shared) {
  const int lane = threadIdx.x % 32;
  const DrawnPlaces<C> places = {shared};
  prefetch(&maps.q);
  wait_for_predecessor();
  Ring<C::kQueryStages> ring;
  uint32_t landed = 0;
  for (uint32_t count = 0;; ++count) {
    places.wait_full(count);
    const GatheredItem item = places.drawn(count).item;
    places.take(count);
    barrier_wait(shared.q_free(ring.stage), ring.round ^ 1);
    const uint32_t full = shared.q_full(ring.stage);
    const bool last = item.work.batch < 0;
    if (last) {
    } else if (p.ragged.queries && item.work.first_query + C::kQueries > item.queries) {
      copy_last_queries<C>(maps, shared, item, ring.stage, landed);
      landed ^= 1;
    } else if (is_elected()) {
      barrier_expect(full, C::kQueryBytes);
      copy_queries<C>(maps, shared, item, ring.stage, full, p.ragged.queries ? 0 : item.work.batch);
    }
    __syncwarp();
    if (lane == 0) {
      *shared.item(ring.stage) = item;
      barrier_arrive(full);
    }
    if (last) return;
    ring.advance();
  }
}

template <class T, class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    gathered_attention(const __grid_constant__ Problem p, const __grid_constant__ Plan plan,
                       const __grid_constant__ Gathering gathering,
                       const __grid_constant__ Maps maps) {
  static_assert(C::kGathered && C::kValueDim == C::kDim && !C::kGeneral);
  extern __shared__ unsigned char memory[];
  const Shared<C> shared(memory);
  if (threadIdx.x == 0) {
    shared.init_barriers(false);
    DrawnPlaces<C>{shared}.init_barriers();
  }
  if constexpr (C::kOnes) shared.fill_ones(pack<T>(1.f, 1.f));
  __syncthreads();
  if (threadIdx.x < 128) {
    give_registers<C::kProducerRegisters>();
    let_dependents_launch();  // they have no place here before a block ends
    if (threadIdx.x / 32 < 2) produce_rows<C>(p, gathering, maps, shared, threadIdx.x / 32 == 1);
    if (threadIdx.x / 32 == 2) draw_tiles<T, C>(p, plan, gathering, shared);
    if (threadIdx.x / 32 == 3) produce_queries<C>(p, maps, shared);
  } else {
    take_registers<C::kConsumerRegisters>();
    Consumer<T, C>(p, plan, maps.o, shared).run();
  }
}

}  // namespace flashonnx::sm90

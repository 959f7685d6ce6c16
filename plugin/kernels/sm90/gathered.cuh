// The kernel for ragged batches and pages: how the producer brings tiles to consumers.
#pragma once

#include "kernels/sm90/consumer.cuh"
#include "kernels/sm90/draw.cuh"

namespace flashonnx::sm90 {

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
// One lane copies, box by box of the copy engine. Pages are looked up for 32 boxes at a time, those
// of the 32 before on their way meanwhile. All of it is kept short: an instruction of these warps
// is one that consumers do not issue.
template <class C>
class Gatherer {
 public:
  __device__ __forceinline__ Gatherer(const Problem& p, const Gathering& gathering,
                                      const CUtensorMap& map, const Shared<C>& shared, bool values)
      : p_(p),
        gathering_(gathering),
        map_(map),
        shared_(shared),
        places_(reinterpret_cast<int32_t*>(shared.memory + C::kPlacesAt) + (values ? 32 : 0)) {
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
    before_ = page_of(chunk());
    move_to_chunk();
    return true;
  }

  // Copies the tile of keys at hand, and goes on to the next; false if there is none.
  __device__ __forceinline__ bool copy(uint32_t to, uint32_t full) {
    if (is_elected() && !rehearses_) barrier_arrive_expecting(full, C::kKeyBytes);
    if (p_.pages.table) {
      if (is_elected() && !rehearses_) copy_pages(to, full);
    } else if (is_elected() && !rehearses_) {
      copy_row(to, full, first_key_ + tile_ * C::kKeys, outer_);
    }
    __syncwarp();
    const bool begins = first_box() % 32 == 0;
    if (--tile_ < first_tile_) return false;
    if (begins) move_to_chunk();
    return true;
  }

  // True once: a launch begins with a tile that is not copied, which brings the code to where it
  // runs while the first one is being found.
  __device__ __forceinline__ bool rehearsed() {
    const bool was = rehearses_;
    rehearses_ = false;
    return was;
  }

  // Whether pages are missing, of any of the keys; bit i: that of box i of the tile at hand.
  __device__ __forceinline__ bool biased() const { return biased_; }
  __device__ __forceinline__ uint32_t missing() const {
    return missing_ >> first_box() % 32 & ((1u << boxes()) - 1);
  }

 private:
  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }
  // Of a tile: a power of two up to 16, so chunks of 32 hold whole tiles.
  __device__ __forceinline__ int boxes() const { return C::kKeys / gathering_.rows.divisor; }
  __device__ __forceinline__ int first_box() const { return tile_ * boxes(); }
  __device__ __forceinline__ int chunk() const { return first_box() / 32; }
  // Of the lane's box.
  __device__ __forceinline__ int key_of(int chunk) const {
    return (chunk * 32 + lane()) * gathering_.rows.divisor;
  }
  __device__ __forceinline__ bool inside(int key) const {
    return static_cast<uint32_t>(key) < static_cast<uint32_t>(limit_);
  }

  // Boxes of pages, by one lane: up to 8 together, which share what they have in common.
  __device__ __forceinline__ void copy_pages(uint32_t to, uint32_t full) const {
    constexpr int kTogether = C::kBoxes == 4 ? 2 : 4;  // rows of boxes; more of them spill
    const int rows = gathering_.rows.divisor, size = p_.pages.size.divisor;
    const int32_t* const places = places_ + first_box() % 32;
    int row = p_.pages.size.rest(first_box() * rows);
    const auto copy = [&](int place) {
      copy_row(to, full, row, place);
      to += rows * C::kBoxRow;
      row = row + rows == size ? 0 : row + rows;
    };
    int i = 0;
#pragma unroll 1
    for (; i + kTogether <= boxes(); i += kTogether) {
#pragma unroll
      for (int j = 0; j < kTogether; ++j) copy(places[i + j]);
    }
#pragma unroll 1
    for (; i < boxes(); ++i) copy(places[i]);
  }

  // The boxes that begin at this row of the tile.
  __device__ __forceinline__ void copy_row(uint32_t to, uint32_t full, int row, int place) const {
#pragma unroll
    for (int box = 0; box < C::kBoxes; ++box) {
      copy_box(to + box * C::kKeys * C::kBoxRow, &map_, full, box * C::kBox, row, head_, place);
    }
  }

  __device__ __forceinline__ int32_t page_of(int chunk) const {
    const Pages& pages = p_.pages;
    const int key = key_of(chunk);
    if (!pages.table || !inside(key)) return -1;
    return pages.table[batch_ * pages.table_batch + pages.size.quotient(key) * pages.table_page];
  }

  // The pages of the chunk at hand. Outside the tensor there are zeros.
  __device__ __forceinline__ void move_to_chunk() {
    if (!p_.pages.table) return;
    const int place = static_cast<uint32_t>(before_) < p_.pages.count ? before_ : -1;
    places_[lane()] = place;
    missing_ = __ballot_sync(0xffffffffu, inside(key_of(chunk())) && place < 0);
    before_ = page_of(chunk() - 1);
    __syncwarp();
  }

  const Problem& p_;
  const Gathering& gathering_;
  const CUtensorMap& map_;
  const Shared<C>& shared_;
  uint32_t count_ = 0;  // of tiles of queries
  bool rehearses_ = true;
  int batch_, head_, limit_, first_tile_, tile_, first_key_, outer_;
  int32_t* const places_;  // pages of the boxes of the chunk at hand
  int32_t before_;         // that of the lane's box in the chunk before
  bool biased_;
  uint32_t missing_;  // boxes of the chunk
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
  Gatherer<C> gatherer(p, gathering, values ? maps.v : maps.k, shared, values);
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

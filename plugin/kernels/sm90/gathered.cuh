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
        values_(values),
        boxes_(C::kKeys / gathering.rows.divisor),
        places_(reinterpret_cast<int32_t*>(shared.memory + C::kPlacesAt) + (values ? 32 : 0)) {
    prefetch(&map);
  }

  // Waits for the next tile of queries; false if there is none.
  __device__ __forceinline__ bool next() {
    const DrawnPlaces<C> places = {shared_};
    places.wait_full(count_);
    const Drawn& drawn = places.drawn(count_);
    batch_ = drawn.item.work.batch;
    head_ = drawn.item.work.kv_head;
    limit_ = drawn.item.span.range.limit;
    first_tile_ = drawn.item.span.first_tile;
    last_tile_ = drawn.item.span.last_tile;
    first_key_ = drawn.first_key;
    outer_ = drawn.outer;
    places.take(count_++);
    return batch_ >= 0;
  }

  // Copies all of its keys, last ones first.
  __device__ __forceinline__ void copy_tiles() {
    if (p_.pages.table) before_ = page_of(chunk(last_tile_));
    for (int tile = last_tile_; tile >= first_tile_;) {
      int end = first_tile_;
      if (p_.pages.table) {
        move_to_chunk(chunk(tile));
        end = max(end, tile & -(32 / boxes_));
      }
      for (; tile >= end; --tile) {
        const uint32_t next = shared_.k_full(1) - shared_.k_full(0), free = next / 2;
        const uint32_t full =
            (values_ ? shared_.v_full(0) : shared_.k_full(0)) + ring_.stage() * next;
        barrier_wait(full + free, ring_.round() ^ 1);
        if (is_elected()) copy_tile(tile, full);
        __syncwarp();
        ring_.advance();
      }
    }
  }

 private:
  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }
  // Of a tile there are a power of two up to 16, so chunks of 32 hold whole tiles.
  __device__ __forceinline__ int chunk(int tile) const {
    return static_cast<uint32_t>(tile * boxes_) / 32;
  }
  // Of the lane's box.
  __device__ __forceinline__ int key_of(int chunk) const {
    return (chunk * 32 + lane()) * gathering_.rows.divisor;
  }
  __device__ __forceinline__ bool inside(int key) const {
    return static_cast<uint32_t>(key) < static_cast<uint32_t>(limit_);
  }

  // By one lane.
  __device__ __forceinline__ void copy_tile(int tile, uint32_t full) const {
    const uint32_t to = (values_ ? shared_.v(0) : shared_.k(0)) + ring_.stage() * C::kKeyBytes;
    if (p_.pages.table && !values_)
      *shared_.present(ring_.stage()) = missing_ == 0 ? ~0u : present(tile);
    barrier_arrive_expecting(full, C::kKeyBytes);
    const int32_t* const places = places_ + static_cast<uint32_t>(tile * boxes_) % 32;
    if (!p_.pages.table) {
      copy_rows(to, full, first_key_ + tile * C::kKeys, outer_);
    } else if (C::kBoxes == 1 || gathering_.whole_rows) {
      copy_pages(to, full, places);
    } else {
      copy_parts(to, full, places);
    }
  }

  // The tile's boxes of whole rows, each where its page says. Four at a time, so that none waits
  // for the one before to leave its registers.
  __device__ __forceinline__ void copy_pages(uint32_t to, uint32_t full,
                                             const int32_t* place) const {
    const uint32_t bytes = gathering_.rows.divisor * C::kDim * 2;
    const int32_t* const end = place + boxes_;
    const auto copy = [&](int at) {
      if constexpr (C::kBoxes > 1) {
        copy_whole_rows(to, &map_, full, at, head_);
      } else {
        copy_rows(to, full, at, 0);
      }
      to += bytes;
    };
    if (boxes_ < 4) {
#pragma unroll 1
      for (; place != end; ++place) copy(*place);
    } else {
#pragma unroll 1
      for (; place != end; place += 4) {
        const int4 at = *reinterpret_cast<const int4*>(place);
        copy(at.x), copy(at.y), copy(at.z), copy(at.w);
      }
    }
  }

  // As well where boxes have a part of the features.
  __device__ __forceinline__ void copy_parts(uint32_t to, uint32_t full,
                                             const int32_t* place) const {
    const int32_t* const end = place + boxes_;
#pragma unroll 1
    for (; place != end; ++place, to += gathering_.rows.divisor * C::kBoxRow)
      copy_rows(to, full, *place, 0);
  }

  // The boxes that begin at this row of the tile.
  __device__ __forceinline__ void copy_rows(uint32_t to, uint32_t full, int row, int outer) const {
#pragma unroll
    for (int box = 0; box < C::kBoxes; ++box) {
      copy_box(to + box * C::kKeys * C::kBoxRow, &map_, full, box * C::kBox, row, head_, outer);
    }
  }

  __device__ __forceinline__ int32_t page_of(int chunk) const {
    const Pages& pages = p_.pages;
    const int key = key_of(chunk);
    if (!inside(key)) return -1;
    return pages.table[static_cast<uint32_t>(batch_) * pages.table_batch +
                       pages.size.quotient(key) * pages.table_page];
  }

  // The places of its boxes. Outside the tensor there are zeros.
  __device__ __forceinline__ void move_to_chunk(int chunk) {
    const int key = key_of(chunk);
    const int page = static_cast<uint32_t>(before_) < p_.pages.count ? before_ : -1;
    places_[lane()] = page * (values_ ? gathering_.v_page : gathering_.k_page) +
                      static_cast<int>(p_.pages.size.rest(key) >> gathering_.unit_bits);
    missing_ = __ballot_sync(0xffffffffu, inside(key) && page < 0);
    before_ = page_of(chunk - 1);
    __syncwarp();
  }

  // Keys of a tile whose pages are not missing, two bits for 8 of them.
  __device__ __forceinline__ uint32_t present(int tile) const {
    constexpr int kBits = C::kKeys / 4;
    const int bits = kBits / boxes_;  // of a box
    uint32_t missing = missing_ >> static_cast<uint32_t>(tile * boxes_) % 32, keys = 0;
#pragma unroll 1
    for (int at = 0; at < kBits; at += bits, missing >>= 1)
      if (!(missing & 1)) keys |= 0xffffffffu >> (32 - bits) << at;
    return keys;
  }

  const Problem& p_;
  const Gathering& gathering_;
  const CUtensorMap& map_;
  const Shared<C>& shared_;
  const bool values_;
  const int boxes_;        // of a tile of keys
  int32_t* const places_;  // of the boxes of the chunk at hand
  uint32_t count_ = 0;     // of tiles of queries
  PackedRing<C::kStages> ring_;
  int batch_, head_, limit_, first_tile_, last_tile_, first_key_, outer_;
  int32_t before_;    // page of the lane's box in the chunk before
  uint32_t missing_;  // boxes of the chunk
};

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
}

// Keys or values.
template <class C>
__device__ __forceinline__ void produce_rows(const Problem& p, const Gathering& gathering,
                                             const Maps& maps, const Shared<C>& shared,
                                             bool values) {
  static_assert(C::kKeyBytes == C::kValueBytes);
  Gatherer<C> gatherer(p, gathering, values ? maps.v : maps.k, shared, values);
  wait_for_predecessor();
  while (gatherer.next()) gatherer.copy_tiles();
}

// Whether a page of the first `keys` keys, of which there are some, is missing. By a warp. Blocks
// begin apart from each other: all at once would wait for the same line of the L2 cache.
__device__ __forceinline__ bool misses_pages(const Pages& pages, int64_t batch, int keys) {
  const int count = pages.size.quotient(keys - 1) + 1;
  const int lines = (count + 31) / 32, first = blockIdx.x % lines;
  const int32_t* const row = pages.table + batch * pages.table_batch;
  bool missing = false;
#pragma unroll 4
  for (int line = 0; line < lines; ++line) {
    const int at = first + line < lines ? first + line : first + line - lines;
    const int i = min(at * 32 + static_cast<int>(threadIdx.x % 32), count - 1);
    missing |= static_cast<uint32_t>(row[i * pages.table_page]) >= pages.count;
  }
  return __any_sync(0xffffffffu, missing);
}

// Queries, and what is to be done with them, as early as there is a place: they come from far.
// While they do, it is found out whether pages are missing.
template <class C>
__device__ __forceinline__ void produce_queries(const Problem& p, const Maps& maps,
                                                const Shared<C>& shared) {
  const int lane = threadIdx.x % 32;
  const DrawnPlaces<C> places = {shared};
  prefetch(&maps.q);
  wait_for_predecessor();
  PackedRing<C::kQueryStages> ring;
  uint32_t landed = 0;
  int known = -1;       // the sequence of which is known whether
  bool misses = false;  // it misses pages
  for (uint32_t count = 0;; ++count) {
    places.wait_full(count);
    const GatheredItem item = places.drawn(count).item;
    places.take(count);
    barrier_wait(shared.q_free(ring.stage()), ring.round() ^ 1);
    const uint32_t full = shared.q_full(ring.stage());
    const bool last = item.work.batch < 0;
    if (last) {
    } else if (p.ragged.queries && item.work.first_query + C::kQueries > item.queries) {
      copy_last_queries<C>(maps, shared, item, ring.stage(), landed);
      landed ^= 1;
    } else if (is_elected()) {
      barrier_expect(full, C::kQueryBytes);
      copy_queries<C>(maps, shared, item, ring.stage(), full,
                      p.ragged.queries ? 0 : item.work.batch);
    }
    if (lane == 0) *shared.item(ring.stage()) = item;
    if (p.pages.table && item.work.batch != known && !last) {
      known = item.work.batch;
      misses = misses_pages(p.pages, known, item.span.range.limit);
    }
    if (lane == 0) shared.item(ring.stage())->misses = misses;
    __syncwarp();
    barrier_arrive(full);
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
  if (threadIdx.x >= 128) {
    take_registers<C::kConsumerRegisters>();
    Consumer<T, C>(p, plan, maps.o, shared, nullptr, &gathering.layout).run();
  } else {
    give_registers<C::kProducerRegisters>();
    let_dependents_launch();  // they have no place here before a block ends
    if (threadIdx.x / 32 < 2) produce_rows<C>(p, gathering, maps, shared, threadIdx.x / 32 == 1);
    if (threadIdx.x / 32 == 2) draw_tiles<T, C>(p, plan, gathering, shared);
    if (threadIdx.x / 32 == 3) produce_queries<C>(p, maps, shared);
  }
}

}  // namespace flashonnx::sm90

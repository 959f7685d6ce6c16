// Tiles of K and V on their way to a warp's own ring in shared memory. No other warp sees them, so
// the walk needs no barrier of the block.
#pragma once

#include "kernels/decode/config.h"
#include "kernels/decode/problem.h"
#include "kernels/sm80/load.cuh"
#include "kernels/sm80/mma.cuh"

namespace flashonnx::decode {

// A tile is rows of kDim elements in chunks of 16 bytes; chunk c of row r stands at c ^ r % 8, so
// that copies, ldmatrix and its transposed form meet no bank twice.
template <class C>
__device__ __forceinline__ uint32_t tile_offset(int row, int chunk) {
  return (row * (C::kDim / 8) + (chunk ^ row % 8)) * 16;
}

// The address of chunk `chunk` + c, for an even constant `chunk`, when `address` is that of chunk c
// = 0 or 1 of the row.
__device__ __forceinline__ uint32_t advance(uint32_t address, int chunk) {
  return (address ^ (chunk % 8 * 16)) + chunk / 8 * 128;
}

template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// A number that a kernel before the last one may have written. Before the wait for that one it
// comes past the first-level cache, which may hold what stood there earlier.
__device__ __forceinline__ int32_t read(const int32_t* from, bool early) {
  return early ? __ldcg(from) : *from;
}

// What tells the keys of a sequence, as it stands in memory: of ragged ones the first token of the
// next, and their own; else the lower half of a length and the upper one, if it has two.
struct GivenKeys {
  int32_t low, high;
};

// One of the two.
__device__ __forceinline__ int32_t given_keys(const Problem& p, const Decode& d, int32_t batch,
                                              int which) {
  if (d.first_keys) return read(d.first_keys + batch + 1 - which, d.early);
  if (!p.key_lengths) return 0;
  const int64_t at = (batch * p.key_lengths_stride << p.lengths_64) + (which & p.lengths_64);
  return read(static_cast<const int32_t*>(p.key_lengths) + at, d.early);
}

// Keys of a sequence.
__device__ __forceinline__ int32_t keys_of(const Problem& p, const Decode& d,
                                           const GivenKeys& given) {
  if (d.first_keys) return min(given.low - given.high, p.key_length);
  if (!p.key_lengths) return p.key_length;
  const int32_t high = p.lengths_64 ? given.high : given.low >> 31;
  const auto low = static_cast<uint32_t>(given.low), most = static_cast<uint32_t>(p.key_length);
  const uint32_t keys = high < 0 ? 0 : high > 0 ? most : min(low, most);
  return static_cast<int32_t>(min(keys + d.added, most));
}

// Copies tiles of the keys of one batch entry and key head. Where a key stands is worked out by two
// lanes, l % 16 == key % 16: those before 16 for K, the others for V; so pages cost a look-up and a
// few instructions a tile, whatever their size. Then a lane copies chunks lane % kRowLanes +
// kRowLanes c of rows lane / kRowLanes + kRowsAtOnce i: up to 256 bytes of a row at once, as each
// row of a copy may be on another page of the memory's translation.
template <class T, class C>
class Loader {
 public:
  static constexpr int kRowLanes = C::kDim == 64 ? 8 : 16;
  static constexpr int kStepBytes = kRowLanes * 16;
  static constexpr int kRowsAtOnce = 32 / kRowLanes;
  static constexpr int kLaneRows = C::kKeys / kRowsAtOnce;
  static constexpr int kLaneChunks = C::kDim / 8 / kRowLanes;
  static constexpr uint32_t kNowhere = 0xffffffff;

  __device__ __forceinline__ Loader(const Problem& p, const Decode& d, int batch, int kv_head,
                                    int begin = 0, int end = 0)
      : d_(d),
        capacity_(p.key_length),
        row_units_(lane() < C::kKeys ? d.k_row_units : d.v_row_units),
        page_units_(lane() < C::kKeys ? d.k_page_units : d.v_page_units) {
    move_to(p, batch, kv_head, begin, end);
  }

  __device__ __forceinline__ void move_to(const Problem& p, int of_batch, int kv_head, int begin,
                                          int end) {
    stay_within(begin, end);
    const int64_t token = d_.first_keys ? d_.first_keys[of_batch] : 0;
    const int64_t batch = d_.block_table || d_.first_keys ? 0 : of_batch;
    k_ = static_cast<const char*>(p.k.data) +
         2 * (batch * p.k.batch + kv_head * p.k.head + token * p.k.row) + lane() % kRowLanes * 16;
    v_ = static_cast<const char*>(p.v.data) +
         2 * (batch * p.v.batch + kv_head * p.v.head + token * p.v.row) + lane() % kRowLanes * 16;
    table_ = d_.block_table + of_batch * d_.table_batch;
    asm("" : "+l"(k_), "+l"(v_));  // or the tensors' addresses are added again and again
  }

  // Keys outside [begin, end) are not read and become zeros.
  __device__ __forceinline__ void stay_within(int begin, int end) {
    begin_ = begin, count_ = max(end - begin, 0);
  }

  // The page of the lane's key of a tile: asked for a tile earlier than the tile itself.
  __device__ __forceinline__ int32_t page_of_tile(int tile) const {
    const int key = tile * C::kKeys + lane() % C::kKeys;
    return d_.block_table && inside(key) ? page_of(key) : 0;
  }

  // Those of the tiles of two turns of the ring, `step` apart, at once: one after the other they
  // would take as many latencies. They may be asked for before a wait, as in `read`.
  struct FirstPages {
    int32_t at[C::kStages];  // of two tiles, of the second for lanes from 16 on; or a tile a lane
  };

  __device__ __forceinline__ FirstPages first_pages(int tile, int step) const {
    FirstPages first = {};
    if (!d_.block_table) return first;
    if (d_.page_of_tiles) {
      const int mine = min(lane(), 2 * C::kStages - 1);
      first.at[0] = __ldcg(entry_of((tile + mine * step) * C::kKeys));
      return first;
    }
#pragma unroll
    for (int j = 0; j < C::kStages; ++j) {
      const int key = (tile + (2 * j + lane() / C::kKeys) * step) * C::kKeys + lane() % C::kKeys;
      first.at[j] = __ldcg(entry_of(key));
    }
    return first;
  }

  __device__ __forceinline__ int32_t page_of_stage(const FirstPages& first, int stage) const {
    if (d_.page_of_tiles) return __shfl_sync(0xffffffffu, first.at[0], stage);
    int32_t mine = first.at[0];
#pragma unroll
    for (int j = 1; j < (C::kStages + 1) / 2; ++j) {
      int32_t other = first.at[j];
      asm("" : "+r"(other));  // or the choice becomes an index into local memory
      mine = stage / 2 == j ? other : mine;
    }
    return __shfl_sync(0xffffffffu, mine, stage % 2 * C::kKeys + lane() % C::kKeys);
  }

  // Pages of tiles that come a turn of the ring later stand in `pages`, kPageBytes for each stage:
  // those after the first kStages are put there, later ones come with the copies of the tile before
  // them, so that no look-up is waited for.
  __device__ __forceinline__ void keep_pages(const FirstPages& first, uint32_t pages) const {
    if (!d_.block_table) return;
    if (d_.page_of_tiles) {
      const int stage = lane() - C::kStages;
      if (stage >= 0 && stage < C::kStages) store_page(pages + stage * C::kPageBytes, first.at[0]);
    } else {
#pragma unroll
      for (int j = C::kStages / 2; j < C::kStages; ++j) {
        const int stage = 2 * j + lane() / C::kKeys - C::kStages;
        if (stage >= 0)
          store_page(pages + stage * C::kPageBytes + lane() % C::kKeys * 4, first.at[j]);
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ int32_t kept_page(uint32_t page) const {
    int32_t kept = 0;
    if (d_.block_table)
      asm volatile("ld.shared.b32 %0, [%1];" : "=r"(kept) : "r"(page + look_up() * 4) : "memory");
    return kept;
  }

  __device__ __forceinline__ void ask_for_page(int tile, uint32_t page) const {
    if (!d_.block_table || look_up() != lane()) return;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(page + lane() * 4),
                 "l"(entry_of(tile * C::kKeys + lane()))
                 : "memory");
  }

  // Whether a slot's page is there. Where pages are used, others are masked.
  __device__ __forceinline__ bool exists(int key) const {
    return !inside(key) || static_cast<uint32_t>(page_of(key)) < d_.pages;
  }

  // Where the lane's key of a tile stands, in units; kNowhere if it has no page or is outside.
  struct Place {
    uint32_t units;
    bool missing;
  };
  __device__ __forceinline__ Place place_of(int tile, int32_t page) const {
    const int key = tile * C::kKeys + lane() % C::kKeys;
    const bool here = inside(key), missing = here && static_cast<uint32_t>(page) >= d_.pages;
    const uint32_t units = d_.page_size.rest(key) * row_units_ + page * page_units_;
    return {here && !missing ? units : kNowhere, missing};
  }

  // Starts the copies of a tile to `shared`: K, then V.
  __device__ __forceinline__ void copy(const Problem& p, const Place& place,
                                       uint32_t shared) const {
    const int row = lane() / kRowLanes;
    const uint32_t to = shared + tile_offset<C>(row, lane() % kRowLanes);
    const auto place_of_row = [&](int i, bool value) {
      return __shfl_sync(0xffffffffu, place.units, (value ? C::kKeys : 0) + kRowsAtOnce * i + row);
    };
    // Further rows only change bits of the swizzle that no first row has set.
    const auto row_at = [&](int i) {
      return (to ^ kRowsAtOnce * i % 8 * 16) + kRowsAtOnce * i * C::kDim * 2;
    };
    if (!d_.vectors) {
#pragma unroll 1
      for (int i = 0; i < kLaneRows; ++i) {
        const uint32_t k = place_of_row(i, false), v = place_of_row(i, true);
        copy_slowly(row_at(i), k_ + uint64_t{k} * d_.unit_bytes, k != kNowhere ? p.head_dim : 0);
        copy_slowly(row_at(i) + C::kTileBytes, v_ + uint64_t{v} * d_.unit_bytes,
                    v != kNowhere ? p.value_dim : 0);
      }
      return;
    }
    const auto copy_rows = [&](bool value, uint32_t tile, const char* from, int dim) {
      uint32_t at[kLaneRows];
#pragma unroll
      for (int i = 0; i < kLaneRows; ++i) at[i] = place_of_row(i, value);
#pragma unroll
      for (int i = 0; i < kLaneRows; ++i) {
#pragma unroll
        for (int c = 0; c < kLaneChunks; ++c) {
          const bool there = at[i] != kNowhere && (c * kRowLanes + lane() % kRowLanes) * 8 < dim;
          sm80::copy_async(tile + row_at(i) + c * kStepBytes,
                           from + uint64_t{at[i]} * kUnitBytes + c * kStepBytes, there ? 16 : 0);
        }
      }
    };
    copy_rows(false, 0, k_, p.head_dim);
    copy_rows(true, C::kTileBytes, v_, p.value_dim);
  }

 private:
  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x % 32); }

  __device__ __forceinline__ bool inside(int key) const {
    return static_cast<uint32_t>(key - begin_) < count_;
  }

  // Which of its tile's look-ups the lane's key needs.
  __device__ __forceinline__ int look_up() const {
    return d_.page_of_tiles ? 0 : lane() % C::kKeys;
  }

  static __device__ __forceinline__ void store_page(uint32_t to, int32_t page) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(page) : "memory");
  }

  // A key's entry of the table, which has some for all that there may be.
  __device__ __forceinline__ const int32_t* entry_of(int key) const {
    return table_ + d_.page_size.quotient(min(key, capacity_ - 1)) * d_.table_page;
  }

  __device__ __forceinline__ int32_t page_of(int key) const { return *entry_of(key); }

  // The lane's chunks of a row that is not one of whole, aligned chunks. A call, so that the loops
  // that never make it stay short.
  static __device__ __noinline__ void copy_slowly(uint32_t to, const char* from, int dim) {
    const int first = lane() % kRowLanes;
#pragma unroll 1
    for (int c = 0; c < kLaneChunks; ++c) {
      const int chunk = c * kRowLanes + first, valid = max(min(dim - chunk * 8, 8), 0);
      const T* const row = reinterpret_cast<const T*>(from - first * 16);
      sm80::store_shared(to + c * kStepBytes,
                         sm80::load_elements(valid > 0 ? row + chunk * 8 : row, valid));
    }
  }

  const Decode& d_;
  const int capacity_;
  int begin_;
  uint32_t count_;
  const uint32_t row_units_, page_units_;
  const char *k_, *v_;  // the lane's first chunk of key 0, or of slot 0 of page 0
  const int32_t* table_;
};

}  // namespace flashonnx::decode

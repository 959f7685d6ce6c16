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

// Where the keys of one batch entry and key head stand, for a lane that copies chunks lane % 8 + 8
// c of rows lane / 8 + 4 i of each tile.
template <class T, class C>
class Loader {
 public:
  static constexpr int kLaneRows = C::kKeys / 4;
  static constexpr int kLaneChunks = C::kDim / 64;
  static constexpr uint32_t kNowhere = 0xffffffff;
  // Pages of the lane's rows; of the tile, in at[0], where it has one only.
  struct Pages {
    int32_t at[kLaneRows];
  };

  // Keys outside [begin, end) are not read and become zeros.
  __device__ __forceinline__ Loader(const Problem& p, const Decode& d, const Work& work, int begin,
                                    int end)
      : d_(d), begin_(begin), count_(max(end - begin, 0)), row_(threadIdx.x % 32 / 8) {
    const int lane = threadIdx.x % 8;
    const int64_t token = d.first_keys ? d.first_keys[work.batch] : 0;
    const int64_t batch = d.block_table || d.first_keys ? 0 : work.batch;
    k_ = static_cast<const char*>(p.k.data) +
         2 * (batch * p.k.batch + work.kv_head * p.k.head + token * p.k.row) + lane * 16;
    v_ = static_cast<const char*>(p.v.data) +
         2 * (batch * p.v.batch + work.kv_head * p.v.head + token * p.v.row) + lane * 16;
    table_ = d.block_table + work.batch * d.table_batch;
    asm("" : "+l"(k_), "+l"(v_));  // or the tensors' addresses are added again and again
#pragma unroll
    for (int c = 0; c < kLaneChunks; ++c) {
      k_count_[c] = (c * 8 + lane) * 8 < p.head_dim ? count_ : 0;
      v_count_[c] = (c * 8 + lane) * 8 < p.value_dim ? count_ : 0;
    }
  }

  // The pages of a tile: asked for a tile earlier than the tile itself.
  __device__ __forceinline__ Pages pages_of(int tile) const {
    Pages pages = {};
    if (!d_.block_table) return pages;
    const int first = tile * C::kKeys;
    if (d_.page_of_tiles) {
      pages.at[0] = page_before_end(first);
      return pages;
    }
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) pages.at[i] = page_before_end(first + 4 * i + row_);
    return pages;
  }

  // The same of the first kStages tiles, `step` apart, at once: each lane asks for a row or two,
  // and gives what it got to those that copy it. One after the other they would take as many
  // latencies.
  struct FirstPages {
    int32_t at[(C::kStages * C::kKeys + 31) / 32];
  };

  __device__ __forceinline__ FirstPages first_pages(int tile, int step) const {
    FirstPages first = {};
    if (!d_.block_table) return first;
#pragma unroll
    for (int j = 0; j < static_cast<int>(sizeof first.at / 4); ++j) {
      const int item = j * 32 + static_cast<int>(threadIdx.x % 32);
      first.at[j] = page_before_end((tile + item / C::kKeys * step) * C::kKeys + item % C::kKeys);
    }
    return first;
  }

  __device__ __forceinline__ Pages pages_of_stage(const FirstPages& first, int stage) const {
    int32_t mine = first.at[0];
#pragma unroll
    for (int j = 1; j < static_cast<int>(sizeof first.at / 4); ++j) {
      int32_t other = first.at[j];
      asm("" : "+r"(other));  // or the choice becomes an index into local memory
      mine = stage / 2 == j ? other : mine;
    }
    Pages pages;
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      const int row = d_.page_of_tiles ? 0 : 4 * i + row_;
      pages.at[i] = __shfl_sync(0xffffffffu, mine, stage % 2 * C::kKeys + row);
    }
    return pages;
  }

  // Whether a slot's page is there. Where pages are used, others are masked.
  __device__ __forceinline__ bool exists(int key) const {
    return !inside(key) || static_cast<uint32_t>(page_of(key)) < d_.pages;
  }

  // Starts the copies of a tile to `shared`: K, then V. False if a page may not be there.
  __device__ __forceinline__ bool copy(const Problem& p, int tile, const Pages& pages,
                                       uint32_t shared) const {
    const int first = tile * C::kKeys + row_;
    const char *k[kLaneRows], *v[kLaneRows];
    uint32_t place[kLaneRows];  // of the keys after the first one that is read
    if (d_.block_table && !d_.page_of_tiles) {
#pragma unroll
      for (int i = 0; i < kLaneRows; ++i) {
        const uint32_t slot = d_.page_size.rest(first + 4 * i), page = pages.at[i];
        k[i] = k_ + uint64_t{page} * d_.k_page_bytes + uint64_t{slot} * d_.k_row_bytes;
        v[i] = v_ + uint64_t{page} * d_.v_page_bytes + uint64_t{slot} * d_.v_row_bytes;
        place[i] = page < d_.pages ? first + 4 * i - begin_ : kNowhere;
      }
    } else {
      uint32_t slot = first, page = 0;
      if (d_.block_table) slot = d_.page_size.rest(first), page = pages.at[0];
      k[0] = k_ + uint64_t{page} * d_.k_page_bytes + uint64_t{slot} * d_.k_row_bytes;
      v[0] = v_ + uint64_t{page} * d_.v_page_bytes + uint64_t{slot} * d_.v_row_bytes;
      place[0] = page < d_.pages ? first - begin_ : kNowhere;
#pragma unroll
      for (int i = 1; i < kLaneRows; ++i) {
        k[i] = k[i - 1] + 4 * uint64_t{d_.k_row_bytes};
        v[i] = v[i - 1] + 4 * uint64_t{d_.v_row_bytes};
        place[i] = page < d_.pages ? first + 4 * i - begin_ : kNowhere;
      }
    }
    const uint32_t to = shared + tile_offset<C>(row_, threadIdx.x % 8);
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      // Four rows further only a bit of the swizzle changes, which no first row has set.
      const uint32_t row = (to ^ i % 2 * 64) + 4 * i * C::kDim * 2;
      if (d_.vectors) {
#pragma unroll
        for (int c = 0; c < kLaneChunks; ++c) {
          const bool read_k = place[i] < k_count_[c], read_v = place[i] < v_count_[c];
          sm80::copy_async(row + c * 128, k[i] + c * 128, read_k ? 16 : 0);
          sm80::copy_async(row + c * 128 + C::kTileBytes, v[i] + c * 128, read_v ? 16 : 0);
        }
      } else {
        copy_slowly(row, k[i], place[i] < count_ ? p.head_dim : 0);
        copy_slowly(row + C::kTileBytes, v[i], place[i] < count_ ? p.value_dim : 0);
      }
    }
    return place[0] != kNowhere && place[1] != kNowhere && place[2] != kNowhere &&
           place[3] != kNowhere;
  }

 private:
  __device__ __forceinline__ bool inside(int key) const {
    return static_cast<uint32_t>(key - begin_) < count_;
  }

  // Slots before the first key that is seen have a place in the table as well; behind the last one
  // there may be none.
  __device__ __forceinline__ int32_t page_before_end(int key) const {
    return key < begin_ + static_cast<int>(count_) ? page_of(key) : 0;
  }

  __device__ __forceinline__ int32_t page_of(int key) const {
    return table_[d_.page_size.quotient(key) * d_.table_page];
  }

  // The lane's chunks of a row that is not one of whole, aligned chunks. A call, so that the loops
  // that never make it stay short.
  static __device__ __noinline__ void copy_slowly(uint32_t to, const char* from, int dim) {
    const int lane = threadIdx.x % 8;
#pragma unroll 1
    for (int c = 0; c < kLaneChunks; ++c) {
      const int chunk = c * 8 + lane, valid = max(min(dim - chunk * 8, 8), 0);
      const T* const row = reinterpret_cast<const T*>(from - lane * 16);
      sm80::store_shared(to + c * 128,
                         sm80::load_elements(valid > 0 ? row + chunk * 8 : row, valid));
    }
  }

  const Decode& d_;
  const int begin_;
  const uint32_t count_;
  const int row_;
  uint32_t k_count_[kLaneChunks], v_count_[kLaneChunks];  // 0 past the last feature
  const char *k_, *v_;  // the lane's first chunk of key 0, or of slot 0 of page 0
  const int32_t* table_;
};

}  // namespace flashonnx::decode

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

// One chunk of a row of `dim` elements, those at or past `dim` as zeros, from memory of any
// alignment.
template <class T>
__device__ __forceinline__ void copy_elements(uint32_t to, const T* row, int chunk, int dim) {
  const int valid = max(min(dim - chunk * 8, 8), 0);
  sm80::store_shared(to, sm80::load_elements(valid > 0 ? row + chunk * 8 : row, valid));
}

// Where the keys of one batch entry and key head stand, for a lane that copies chunks lane % 8 + 8 c
// of rows lane / 8 + 4 i of each tile.
template <class T, class C>
class Loader {
 public:
  static constexpr int kLaneRows = C::kKeys / 4;
  static constexpr int kLaneChunks = C::kDim / 64;
  struct Pages {
    int32_t at[kLaneRows];  // of the lane's rows
  };

  // Keys outside [begin, end) are not read and become zeros.
  __device__ __forceinline__ Loader(const Problem& p, const Decode& d, const Work& work, int begin,
                                    int end)
      : p_(p), d_(d), begin_(begin), end_(end), row_(threadIdx.x % 32 / 8), lane_(threadIdx.x % 8) {
    const int64_t token = d.first_keys ? d.first_keys[work.batch] : 0;
    const int64_t batch = d.block_table || d.first_keys ? 0 : work.batch;
    k_ = static_cast<const char*>(p.k.data) +
         2 * (batch * p.k.batch + work.kv_head * p.k.head + token * p.k.row) + lane_ * 16;
    v_ = static_cast<const char*>(p.v.data) +
         2 * (batch * p.v.batch + work.kv_head * p.v.head + token * p.v.row) + lane_ * 16;
    table_ = d.block_table + work.batch * d.table_batch;
  }

  // The pages of a tile's rows: asked for a tile earlier than the tile itself.
  __device__ __forceinline__ Pages pages_of(int tile) const {
    Pages pages = {};
    if (d_.block_table) {
#pragma unroll
      for (int i = 0; i < kLaneRows; ++i) {
        const int key = tile * C::kKeys + 4 * i + row_;
        if (inside(key)) pages.at[i] = page_of(key);
      }
    }
    return pages;
  }

  // Whether a slot's page is there. Where pages are used, others are masked.
  __device__ __forceinline__ bool exists(int key) const {
    return !inside(key) || static_cast<uint32_t>(page_of(key)) < d_.pages;
  }

  // Starts the copies of a tile to `shared`: K, then V.
  __device__ __forceinline__ void copy(int tile, const Pages& pages, uint32_t shared) const {
    const uint32_t to = shared + tile_offset<C>(row_, lane_);
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      const int key = tile * C::kKeys + 4 * i + row_;
      bool valid = inside(key);
      uint32_t slot = valid ? key : begin_;
      const char *k = k_, *v = v_;
      if (d_.block_table) {
        const uint32_t page = pages.at[i];
        valid = valid && page < d_.pages;
        slot = valid ? key - d_.page_size.quotient(key) * d_.page_size.divisor : 0;
        k += uint64_t{valid ? page : 0} * d_.k_page_bytes;
        v += uint64_t{valid ? page : 0} * d_.v_page_bytes;
      }
      k += uint64_t{slot} * d_.k_row_bytes;
      v += uint64_t{slot} * d_.v_row_bytes;
      // Two steps of rows only change a bit of the swizzle that no first row has set.
      const uint32_t row = (to ^ i % 2 * 64) + 4 * i * C::kDim * 2;
      if (d_.vectors) {
        copy_row(row, k, valid ? p_.head_dim : 0);
        copy_row(row + C::kTileBytes, v, valid ? p_.value_dim : 0);
      } else {
        copy_row_slowly(row, k, valid ? p_.head_dim : 0);
        copy_row_slowly(row + C::kTileBytes, v, valid ? p_.value_dim : 0);
      }
    }
  }

 private:
  __device__ __forceinline__ bool inside(int key) const { return key >= begin_ && key < end_; }

  __device__ __forceinline__ int32_t page_of(int key) const {
    return table_[d_.page_size.quotient(key) * d_.table_page];
  }

  // Rows of whole chunks.
  __device__ __forceinline__ void copy_row(uint32_t to, const char* from, int dim) const {
#pragma unroll
    for (int c = 0; c < kLaneChunks; ++c) {
      const bool read = (c * 8 + lane_) * 8 < dim;
      sm80::copy_async(to + c * 128, read ? from + c * 128 : from - lane_ * 16, read ? 16 : 0);
    }
  }

  __device__ __forceinline__ void copy_row_slowly(uint32_t to, const char* from, int dim) const {
    const T* const row = reinterpret_cast<const T*>(from - lane_ * 16);
#pragma unroll 1
    for (int c = 0; c < kLaneChunks; ++c) copy_elements(to + c * 128, row, c * 8 + lane_, dim);
  }

  const Problem& p_;
  const Decode& d_;
  const int begin_, end_;
  const int row_, lane_;
  const char *k_, *v_;  // the lane's first chunk of key 0, or of slot 0 of page 0
  const int32_t* table_;
};

}  // namespace flashonnx::decode

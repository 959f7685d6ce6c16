// What comes before attention over a cache or a ragged batch, in one pass over the new tokens:
// rotary embeddings, the new keys' and values' slots, and the lengths that come of it. Nothing is
// ever read or written outside of the tensors, whatever stands in lengths, tables and sequences.
#pragma once

#include <cstdint>

#include "kernels/table.h"

#ifdef __CUDACC__
#define FLASHONNX_CACHE_INLINE __host__ __device__ __forceinline__
#else
#define FLASHONNX_CACHE_INLINE inline
#endif

namespace flashonnx {

// `params` is the caller's problem; of `problem`, the one that kernels get, these are written:
//   key_lengths   keys in the cache after this call; on CUDA devices, a 0 after the last
//   cu_seqlens_*  in order and range; as well after cu_seqlens_q
//   q             rotated queries, where there is a rotary embedding
//   k, v          the cache, to which the new keys and values are appended
//   o, lse        0 and -inf in ragged rows that are in no sequence, or too far into theirs
namespace cpu {
flashonnx_status prepare(const Params& params, const Params& problem);
}
flashonnx_status prepare_cuda(const Params& params, const Params& problem, void* stream);

// An index or a length from a device's tensor.
FLASHONNX_CACHE_INLINE int64_t integer_at(const flashonnx_tensor& tensor, int64_t element) {
  return tensor.dtype == FLASHONNX_INT64 ? static_cast<const int64_t*>(tensor.data)[element]
                                         : static_cast<const int32_t*>(tensor.data)[element];
}

FLASHONNX_CACHE_INLINE int64_t between(int64_t x, int64_t low, int64_t high) {
  return x < low ? low : x > high ? high : x;
}

// Keys of batch entry b in the cache before the call, within its bounds.
FLASHONNX_CACHE_INLINE int64_t cached_keys(const Params& params, int64_t b) {
  return between(integer_at(params.cache_lengths, b * params.cache_lengths.stride[0]), 0,
                 params.cache_capacity);
}

// Where key `slot` of batch entry b and key head h stands in a cache, in elements; -1: nowhere.
FLASHONNX_CACHE_INLINE int64_t place_of_key(const Params& params, const flashonnx_tensor& cache,
                                            int64_t b, int64_t h, int64_t slot) {
  if (slot >= params.cache_capacity) return -1;
  int64_t block = b;
  if (params.page_size > 0) {
    const flashonnx_tensor& table = params.block_table;
    // Both are below 2^31, and 32 bits are much faster to divide.
    const uint32_t at = static_cast<uint32_t>(slot), size = static_cast<uint32_t>(params.page_size);
    block = static_cast<const int32_t*>(
        table.data)[b * table.stride[0] + int64_t{at / size} * table.stride[1]];
    if (block < 0 || block >= params.num_pages) return -1;
    slot = at % size;
  }
  return block * cache.stride[0] + h * cache.stride[1] + slot * cache.stride[2];
}

// The row of the rotary tables for token i of `tokens` of batch entry b; `row`: its row in ragged
// tensors.
FLASHONNX_CACHE_INLINE int64_t rotary_position(const Params& params, int64_t b, int64_t i,
                                               int64_t tokens, int64_t row) {
  const flashonnx_tensor& given = params.rotary_positions;
  const bool ragged = params.cu_seqlens_q.dtype != FLASHONNX_NONE;
  const bool appended = params.k.dtype != FLASHONNX_NONE;
  const int64_t position =
      given.dtype == FLASHONNX_NONE
          ? cached_keys(params, b) + i - (appended ? 0 : tokens)
          : static_cast<const int64_t*>(
                given.data)[ragged ? row * given.stride[1]
                                   : b * given.stride[0] + i * given.stride[1]];
  return between(position, 0, params.rotary_length - 1);
}

}  // namespace flashonnx

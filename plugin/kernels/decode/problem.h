// What the kernel is told beyond the problem, and which part of it a block takes.
#pragma once

#include <cstdint>

#include "kernels/common/plan.h"
#include "kernels/common/problem.h"

namespace flashonnx::decode {

constexpr uint32_t kUnitBytes = 16;

struct Decode {
  // Ragged batches: first tokens of each sequence; null: (B, H, S, D) views.
  const int32_t* first_queries;
  const int32_t* first_keys;
  // Pages: null if K and V are contiguous.
  const int32_t* block_table;
  int64_t table_batch, table_page;  // its strides
  uint32_t pages;     // that there are (1 without a table); slots of a page that is not are masked
  Divider page_size;  // more than all keys without a table
  int32_t page_of_tiles;  // no tile of keys has more than one page
  // Strides of keys and pages, in units: so places have 32 bits. Of 16 bytes, or of elements.
  uint32_t k_row_units, v_row_units, k_page_units, v_page_units;
  uint32_t unit_bytes;

  // After the kernel that appends to a cache, which adds `added` keys to what key_lengths say. If
  // `early`, that one began when all before it was done, and only its keys and rotated queries have
  // to be waited for: the rest may be read while it still runs.
  int32_t early, added;
  int32_t late_queries;  // that kernel writes Q

  // Query i sees keys from i + first_key on and before i + last_key, both shifted by the batch
  // entry's keys minus its queries if offset_from_lengths says so.
  int32_t first_key, last_key;

  // A cluster of `cluster` blocks and `partitions` of them share the keys of up to kRows queries.
  Divider cluster, partitions, row_tiles, kv_heads, group;
  Divider parts;  // cluster * partitions
  int32_t rows;   // kRows of the tiling; with shares those that there are
  int32_t warps;
  int32_t batches;    // with shares, whose number is `parts`
  int32_t q_vectors;  // rows of Q begin at multiples of 16 bytes and have a multiple of 8 elements
  int32_t vectors;    // those of K and V
  int32_t o_vectors;  // those of O likewise, of 4 elements of Q's type
  int32_t mask_bytes;
  float factor, cap_in, cap_out;  // see Plan

  // With shares, whose number is `parts`, a warp's parts of units: see part_at.
  // Partial results where partitions > 1: of partition g and packed row r (rows of all blocks one
  // after the other, kRows each), sums of P V at (g * all_rows + r) * partial_dim, {maximum, sum}
  // at g * all_rows + r.
  float* partial_outputs;
  float2* partial_sums;
  int64_t all_rows;
  int32_t partial_dim;  // Dv rounded up to 4
};

struct Work {
  int32_t batch, kv_head, row_tile, partition, rank;
};

FLASHONNX_HOST_DEVICE Work work_of(const Decode& decode, uint32_t block) {
  const auto take = [&block](const Divider& divider) {
    const uint32_t quotient = divider.quotient(block);
    const uint32_t rest = block - quotient * divider.divisor;
    block = quotient;
    return static_cast<int32_t>(rest);
  };
  Work work;
  work.rank = take(decode.cluster);
  work.partition = take(decode.partitions);
  work.row_tile = take(decode.row_tiles);
  work.kv_head = take(decode.kv_heads);
  work.batch = static_cast<int32_t>(block);
  return work;
}

// A sequence's own queries, of which the first q_length are answered.
FLASHONNX_HOST_DEVICE int32_t queries_of(const Problem& p, const Decode& d, int32_t batch) {
  return d.first_queries ? d.first_queries[batch + 1] - d.first_queries[batch] : p.q_length;
}

// Packed rows to answer, from the first row of a tile on.
FLASHONNX_HOST_DEVICE int32_t rows_from(const Problem& p, const Decode& d, int32_t queries,
                                        int32_t first_row) {
  const int32_t answered = queries < p.q_length ? queries : p.q_length;
  return answered * static_cast<int32_t>(d.group.divisor) - first_row;
}

// Kernels count queries and keys in 32 bits, and sums of three such numbers have to fit.
constexpr int64_t kMostPositions = int64_t{1} << 29;

// As key_range, for a batch entry with `queries` queries.
FLASHONNX_HOST_DEVICE KeyRange range_of(const Problem& p, const Decode& d, int32_t queries,
                                        int32_t keys) {
  const int32_t shift = p.offset_from_lengths ? keys - queries : 0;
  return {d.first_key + shift, d.last_key + shift, keys < p.key_limit ? keys : p.key_limit};
}

}  // namespace flashonnx::decode

// Which tiles of queries a block takes, and which tiles of keys each of them walks over.
#pragma once

#include <algorithm>
#include <type_traits>

#include "kernels/common/plan.h"

namespace flashonnx::sm90 {

// Blocks take items in rounds, each its own without asking: there is no state to reset. An item is
// a tile of queries, or a couple of them, and all are dealt out in one order:
//
// - Tiles that are all as long: head by head, neighbours share K and V.
// - Later tiles of a head see more keys: couples of a long tile and a short one of the next head,
//   all equally long, then the tiles of the last heads, longest first. What is left over of the
//   last rounds is short then (couples alone: up to 6 % more for the busiest block).
struct Schedule {
  int32_t row_tiles;  // tiles of queries of one head
  int32_t batch_heads;
  int32_t couples;  // the first items
  int32_t sorted;   // heads whose tiles follow longest first
  int32_t items;
  int32_t turns;  // of a block, two a round: of a tile that is no couple, the second is empty
  Divider by_row_tiles, by_sorted, by_q_heads, by_group;

  static constexpr int kSortedRounds = 3;

  Schedule(const Problem& p, const Plan& plan, int queries, int blocks)
      : row_tiles((p.q_length + queries - 1) / queries),
        batch_heads(static_cast<int32_t>(p.batch_heads)),
        by_row_tiles(row_tiles),
        by_q_heads(plan.q_heads),
        by_group(plan.group) {
    // Short heads of many features would not stay in the L2 cache until their last tile's turn.
    const bool stay = p.head_dim <= 128 || row_tiles >= 16;
    const bool few = (batch_heads + 1) / 2 * row_tiles < blocks;
    const int rounds = stay || few ? kSortedRounds : 0;
    sorted = plan.longest_last
                 ? std::min(batch_heads, (rounds * blocks + row_tiles - 1) / row_tiles)
                 : 0;
    if (plan.longest_last && (batch_heads - sorted) % 2 != 0) ++sorted;
    by_sorted = Divider(std::max(sorted, 1));
    couples = plan.longest_last ? (batch_heads - sorted) / 2 * row_tiles : 0;
    items = couples + (plan.longest_last ? sorted : batch_heads) * row_tiles;
    turns = (items + blocks - 1) / blocks * 2;
  }

  // The tile of a turn; false if the block has none in it.
  FLASHONNX_HOST_DEVICE bool work(int turn, int block, int blocks, int queries, Work* work) const {
    const int round = turn / 2, second = turn % 2;
    // Who had a longer one gets a shorter one next.
    const bool turned = sorted > 0 && round % 2 == 1;
    const uint32_t item = round * blocks + (turned ? blocks - 1 - block : block);
    if (item >= static_cast<uint32_t>(items)) return false;
    const bool couple = item < static_cast<uint32_t>(couples);
    if (second && !couple) return false;
    uint32_t head, tile;
    if (sorted > 0 && !couple) {
      const uint32_t length = by_sorted.quotient(item - couples);
      head = batch_heads - sorted + (item - couples - length * sorted);
      tile = row_tiles - 1 - length;
    } else {
      head = by_row_tiles.quotient(item);
      tile = item - head * row_tiles;
      if (couple) {
        head = 2 * head + second;
        tile = second ? tile : row_tiles - 1 - tile;
      }
    }
    const uint32_t batch = by_q_heads.quotient(head);
    work->batch = static_cast<int32_t>(batch);
    work->head = static_cast<int32_t>(head - batch * by_q_heads.divisor);
    work->kv_head = static_cast<int32_t>(by_group.quotient(work->head));
    work->first_query = static_cast<int32_t>(tile) * queries;
    return true;
  }
};

struct Span {
  KeyRange range;
  int32_t first_tile,
      last_tile;  // first > last: no query sees a key, and consumers never hear of it
};

constexpr int kMarkedTiles = 480;

// Of tiles, in the packed mask. Steady: scores stay near the maxima of the first tile that is met.
// Uniform: all tiles but that one are visible, and all of them biased, or none. Level, with
// weights: some rows are (coarse.cuh).
struct MaskRow {
  uint32_t index : 28, steady : 1, uniform : 1, biased : 1, level : 1;
};

// What a mask that does not depend on the query does to tiles of keys: see visible.cuh.
struct Marks {
  uint32_t visible[kMarkedTiles / 32];
  uint32_t biased[kMarkedTiles / 32];
  MaskRow row;
};

// What the producer tells the consumers to do.
struct alignas(16) Item {
  Work work;  // batch < 0: nothing, that was all
  Span span;
  Marks marks;  // if there is such a mask
};

// As well of a ragged batch, or one with pages; in the same place.
struct alignas(16) GatheredItem {
  Work work;
  Span span;
  int32_t queries;  // of the sequence
  int32_t token;    // row of its first query
  int32_t misses;   // pages, of some keys
};

template <class C>
using ItemOf = std::conditional_t<C::kGathered, GatheredItem, Item>;

template <class C>
__device__ __forceinline__ int queries_of(const Problem& p, const ItemOf<C>& item) {
  if constexpr (C::kGathered) {
    return item.queries;
  } else {
    return p.q_length;
  }
}
template <class C>
__device__ __forceinline__ int token_of(const ItemOf<C>& item) {
  if constexpr (C::kGathered) {
    return item.token;
  } else {
    return 0;
  }
}

template <class C>
__device__ __forceinline__ Span span_of(const Problem& p, const Work& work) {
  Span span;
  span.range = key_range(p, key_length_of(p, work.batch));
  const int begin = span.range.lower(work.first_query);
  const int end = span.range.upper(min(work.first_query + C::kQueries, p.q_length) - 1);
  span.first_tile = begin / C::kKeys;
  span.last_tile = begin < end ? (end - 1) / C::kKeys : span.first_tile - 1;
  return span;
}

}  // namespace flashonnx::sm90

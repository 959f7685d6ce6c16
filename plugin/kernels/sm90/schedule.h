// Which tiles of queries a block takes, and which tiles of keys each of them walks over.
#pragma once

#include "kernels/common/plan.h"

namespace flashonnx::sm90 {

// Blocks take tiles in rounds, each its own without asking: there is no state to reset.
struct Schedule {
  enum Order : int32_t {
    kInOrder,       // all tiles are as long; neighbours share K and V
    kLongestFirst,  // later tiles of a head see more keys, and there are few tiles
    kCouples,       // as well, and there are many: a long one, then a short one of the next head
  };
  Order order;
  int32_t row_tiles;  // tiles of queries of one head
  int32_t batch_heads;
  int32_t items;  // dealt out: couples or tiles
  Divider by_row_tiles, by_batch_heads, by_q_heads, by_group;

  Schedule(const Problem& p, const Plan& plan, int queries, int blocks)
      : row_tiles((p.q_length + queries - 1) / queries),
        batch_heads(static_cast<int32_t>(p.batch_heads)),
        by_row_tiles(row_tiles),
        by_batch_heads(batch_heads),
        by_q_heads(plan.q_heads),
        by_group(plan.group) {
    const int32_t couples = (batch_heads + 1) / 2 * row_tiles;
    order = !plan.longest_last ? kInOrder : couples < blocks ? kLongestFirst : kCouples;
    items = order == kCouples ? couples : row_tiles * batch_heads;
  }

  FLASHONNX_HOST_DEVICE int rounds(int blocks) const {
    const int each = (items + blocks - 1) / blocks;
    return order == kCouples ? 2 * each : each;
  }

  // The tile of a round; false if the block has none in it.
  FLASHONNX_HOST_DEVICE bool work(int round, int block, int blocks, int queries, Work* work) const {
    const int second = order == kCouples ? round % 2 : 0;
    const int deal = order == kCouples ? round / 2 : round;
    // Who had a longer one gets a shorter one next.
    const bool turned = order == kLongestFirst && deal % 2 == 1;
    const uint32_t item = deal * blocks + (turned ? blocks - 1 - block : block);
    if (item >= static_cast<uint32_t>(items)) return false;
    uint32_t head, tile;
    if (order == kLongestFirst) {
      const uint32_t length = by_batch_heads.quotient(item);
      head = item - length * batch_heads;
      tile = row_tiles - 1 - length;
    } else {
      head = by_row_tiles.quotient(item);
      tile = item - head * row_tiles;
      if (order == kCouples) {
        head = 2 * head + second;
        tile = second ? tile : row_tiles - 1 - tile;
      }
    }
    if (head >= static_cast<uint32_t>(batch_heads)) return false;
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

// What the producer tells the consumers to do.
struct alignas(16) Item {
  Work work;  // batch < 0: nothing, that was all
  Span span;
  int32_t queries;  // of the batch entry
  int32_t token;    // row of its first query
  int32_t biased;   // keys may have biases
};

// What a gathered problem's producer is told: see gathered.cuh.
struct alignas(16) Drawn {
  Item item;
  int32_t outer;      // batch entry of K and V, of which there is one if they are ragged
  int32_t first_key;  // row of its first key
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

// Of dense problems.
template <class C>
__device__ __forceinline__ Span span_of(const Problem& p, const Work& work) {
  return span_of<C>(p, work, {0, 0, p.q_length, key_length_of(p, work.batch), p.q_length});
}

}  // namespace flashonnx::sm90

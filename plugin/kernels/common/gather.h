// Ragged batches and paged keys: where the tokens of a sequence stand, and where one of its keys.
#pragma once

#include <cstdint>

#include "kernels/common/divider.h"
#include "kernels/table.h"

namespace flashonnx {

struct Ragged {
  const int32_t* queries;  // first token of each sequence, and the end; null: not ragged
  const int32_t* keys;     // as well; null: keys stand by batch entry, or in pages
  int32_t sequences;
  int32_t tokens;  // of all queries, those in no sequence too
};

struct Pages {
  const int32_t* table;             // null: there are none
  int64_t table_batch, table_page;  // its strides
  int64_t k, v;                     // elements from a page to the next
  uint32_t count;
  Divider size;  // in slots
};

Ragged ragged_of(const Params& params);
Pages pages_of(const Params& params);

// How many rows of Q, O and lse, or of K and V, lie a row stride apart, and how many such runs a
// batch stride apart.
struct Rows {
  int64_t batch, rows;
};
Rows query_rows(const Params& params);
Rows key_rows(const Params& params);

struct Sequence {
  int32_t first_query, first_key;  // among all tokens
  int32_t length, keys;            // of queries, of keys
  int32_t queries;                 // that are to be answered: the first ones
};

FLASHONNX_HOST_DEVICE int32_t at_most(int32_t x, int32_t most) { return x < most ? x : most; }

template <class Problem>
FLASHONNX_HOST_DEVICE Sequence sequence_of(const Problem& p, int32_t batch) {
  Sequence sequence = {0, 0, p.q_length, 0, p.q_length};
  if (const int32_t* first = p.ragged.queries) {
    sequence.first_query = first[batch];
    sequence.length = first[batch + 1] - first[batch];
    sequence.queries = at_most(sequence.length, p.q_length);
  }
  if (const int32_t* first = p.ragged.keys) {
    sequence.first_key = first[batch];
    sequence.keys = at_most(first[batch + 1] - first[batch], p.key_length);
  } else {
    sequence.keys = key_length_of(p, batch);
  }
  return sequence;
}

struct Slot {
  int32_t page, slot;  // page < 0: there is no such key
};

FLASHONNX_HOST_DEVICE Slot slot_of(const Pages& pages, int64_t batch, int32_t key) {
  const int32_t index = static_cast<int32_t>(pages.size.quotient(key));
  const int32_t page = pages.table[batch * pages.table_batch + index * pages.table_page];
  const int32_t slot = key - index * static_cast<int32_t>(pages.size.divisor);
  return {static_cast<uint32_t>(page) < pages.count ? page : -1, slot};
}

}  // namespace flashonnx

// Finding a tile's or a token's sequence in a ragged batch.
#pragma once

#include "kernels/common/gather.h"

namespace flashonnx {

// Tiles of `rows` queries are numbered without a look at all lengths: those of a sequence begin
// here, which leaves room for the tiles of the one before. T / rows + B are enough for T tokens of
// B sequences.
FLASHONNX_HOST_DEVICE int32_t first_tile(const Ragged& ragged, int32_t sequence, int32_t rows) {
  return static_cast<int32_t>(static_cast<uint32_t>(ragged.queries[sequence]) / rows) + sequence;
}

// The last of `count` ordered numbers that is at most `x`, by its index; 0 if there is none. All
// threads of a warp call this; each step looks at 32 numbers.
template <class Number>
__device__ __forceinline__ int32_t find_last(int32_t count, int32_t x, Number number) {
  const int32_t lane = threadIdx.x % 32;
  int32_t found = 0;
  while (count > 1) {
    const int32_t step = (count - 1) / 32 + 1;
    const bool inside = lane < (count - 1) / step + 1;
    const bool below = lane == 0 || (inside && number(found + lane * step) <= x);
    const int32_t last = 31 - __clz(static_cast<int>(__ballot_sync(0xffffffffu, below)));
    found += last * step;
    count = count - last * step < step ? count - last * step : step;
  }
  return found;
}

// Which sequence a tile belongs to, and its first query there; negative or beyond the sequence's
// length if the tile is empty.
struct Tile {
  int32_t sequence, first_query;
};
__device__ __forceinline__ Tile find_tile(const Ragged& ragged, int32_t tile, int32_t rows) {
  const int32_t sequence =
      find_last(ragged.sequences, tile, [&](int32_t i) { return first_tile(ragged, i, rows); });
  return {sequence, (tile - first_tile(ragged, sequence, rows)) * rows};
}

}  // namespace flashonnx

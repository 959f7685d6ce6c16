// Equal shares of the tiles of all units, one after the other: which tiles are a warp's, and which
// warps have parts of a unit. Both kernels work it out from the lengths, each warp for itself.
#pragma once

#include "kernels/decode/tile.cuh"

namespace flashonnx::decode {

// A key head of a batch entry, whose packed rows are one tile.
struct Unit {
  Rows rows;
  Keys keys;
  __device__ __forceinline__ int last_tile() const { return keys.first_tile + keys.tiles; }
};

// The lengths of up to 32 batch entries, each lane's its own; so they are asked for once.
class Lengths {
 public:
  __device__ __forceinline__ Lengths(const Problem& p, const Decode& d, int rows) : rows_(rows) {
    const int batch = threadIdx.x % 32;
    queries_ = batch < d.batches ? queries_of(p, d, batch) : 0;
    keys_ = 0;
    if (batch < d.batches)
      keys_ = keys_of(p, d, {given_keys(p, d, batch, 0), given_keys(p, d, batch, 1)});
    tiles_ = batch < d.batches ? unit(p, d, batch, 0, queries_, keys_).keys.tiles : 0;
  }

  // By all lanes of a warp, for the same one.
  __device__ __forceinline__ Unit unit(const Problem& p, const Decode& d, int batch,
                                       int kv_head) const {
    return unit(p, d, batch, kv_head, of(queries_, batch), of(keys_, batch));
  }

  // The next one that has keys.
  __device__ __forceinline__ Unit after(const Problem& p, const Decode& d, const Unit& last) const {
    Unit next = last;
    if (++next.rows.kv_head < static_cast<int>(d.kv_heads.divisor)) return next;
    const uint32_t left = __ballot_sync(0xffffffffu, tiles_ > 0) & ~0u << last.rows.batch << 1;
    return unit(p, d, __ffs(static_cast<int>(left)) - 1, 0);
  }

  __device__ __forceinline__ int tiles() const { return tiles_; }  // of a unit of the lane's entry
  __device__ __forceinline__ int of(int x, int batch) const {
    return __shfl_sync(0xffffffffu, x, batch);
  }

 private:
  __device__ __forceinline__ Unit unit(const Problem& p, const Decode& d, int batch, int kv_head,
                                       int queries, int keys) const {
    const Rows rows = {0, min(rows_from(p, d, queries, 0), rows_), batch, kv_head};
    return {rows, Keys(p, d, rows, queries, keys)};
  }

  const int rows_;
  int queries_, keys_, tiles_;
};

// How so many tiles are dealt out: `each` to a share, and one more to the first `longer` of them.
struct Deal {
  int each, longer;
  __device__ __forceinline__ Deal(const Decode& d, uint32_t tiles)
      : each(d.parts.quotient(tiles)), longer(tiles - each * d.parts.divisor) {}
  __device__ __forceinline__ int first(int share) const {
    return share * each + min(share, longer);
  }
  __device__ __forceinline__ int tiles(int share) const { return each + (share < longer ? 1 : 0); }
  // The share that has a tile.
  __device__ __forceinline__ int owner(int tile) const {
    const int longest = longer * (each + 1);
    return tile < longest ? tile / (each + 1) : longer + (tile - longest) / each;
  }
};

struct Share {
  int batch, kv_head, offset, tiles;  // begins with tile `offset` of that unit
};

// By all lanes of a warp, which get the same.
__device__ __forceinline__ Share share_of(const Decode& d, const Lengths& lengths, int index) {
  const int lane = threadIdx.x % 32, heads = d.kv_heads.divisor;
  int until = lengths.tiles();  // and with the lane's
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, until, step);
    if (lane >= step) until += other;
  }
  const Deal deal(d, lengths.of(until, 31) * heads);
  Share share = {0, 0, deal.first(index), deal.tiles(index)};
  const uint32_t behind = __ballot_sync(0xffffffffu, until * heads > share.offset);
  if (share.tiles == 0) return share;
  share.batch = __ffs(static_cast<int>(behind)) - 1;
  const int of_unit = lengths.of(lengths.tiles(), share.batch);
  share.offset -= (lengths.of(until, share.batch) - of_unit) * heads;
  share.kv_head = share.offset / of_unit;
  share.offset -= share.kv_head * of_unit;
  return share;
}

// Shares that have parts of a unit: [first, first + count).
struct Parts {
  int first, count;
};

__device__ __forceinline__ Parts parts_of(const Decode& d, const Lengths& lengths, int batch,
                                          int kv_head) {
  const int lane = threadIdx.x % 32, heads = d.kv_heads.divisor;
  const int all = __reduce_add_sync(0xffffffffu, lengths.tiles());
  const int before = __reduce_add_sync(0xffffffffu, lane < batch ? lengths.tiles() : 0);
  const int own = lengths.of(lengths.tiles(), batch);
  if (own == 0) return {0, 0};
  const Deal deal(d, all * heads);
  const int tile = before * heads + kv_head * own, first = deal.owner(tile);
  return {first, deal.owner(tile + own - 1) - first + 1};
}

// Where a part of a unit stands in the workspace: parts in order have growing numbers, each one
// more than the last at least. A part is the rows' sums, and the outputs as threads have them:
// of row r and column c of a warp 4 features 8 apart, from 32 i + c on, at ((i * rows + r) * 8 + c)
// * 4.
__device__ __forceinline__ int64_t part_at(const Decode& d, int share, int batch, int kv_head) {
  return int64_t{share + batch * static_cast<int>(d.kv_heads.divisor) + kv_head} * d.rows;
}

}  // namespace flashonnx::decode

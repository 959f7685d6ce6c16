// What a warp does with a tile of keys and values in shared memory, and what it needs to know of
// the rows that it does it for.
#pragma once

#include "kernels/decode/mask.cuh"

namespace flashonnx::decode {

// Which keys a tile of rows sees.
struct Keys {
  KeyRange range;
  int begin, end;              // that any of the rows sees
  int clear_begin, clear_end;  // that all of them see
  int first_tile, tiles;

  Keys() = default;
  __device__ __forceinline__ Keys(const Problem& p, const Decode& d, const Rows& rows, int queries,
                                  int keys)
      : range(range_of(p, d, queries, keys)) {
    const int first = rows.query(d, 0), last = rows.query(d, rows.count - 1);
    begin = range.lower(first), end = range.upper(last);
    clear_begin = range.lower(last), clear_end = range.upper(first);
    first_tile = begin / kTileKeys;
    tiles = rows.count > 0 && end > begin ? (end - 1) / kTileKeys - first_tile + 1 : 0;
  }
};

// Whether some row may not see a key that another one sees.
__device__ __forceinline__ bool may_be_masked(const Problem& p, const Keys& keys) {
  return p.mask.data || keys.clear_begin > keys.begin || keys.clear_end < keys.end;
}

// Copies Q, `threads` threads together; rows that are not there become zeros. kLater: whole vectors
// are only asked for, and come with the next group of copies.
template <class T, class C, bool kLater>
__device__ __forceinline__ void copy_queries(const Problem& p, const Decode& d, const Rows& rows,
                                             int thread, int threads, uint32_t shared) {
  constexpr int kChunks = C::kDim / 8;
  const int64_t batch = d.first_queries ? 0 : rows.batch;
  const int64_t token = d.first_queries ? d.first_queries[rows.batch] : 0;
  const T* const data = static_cast<const T*>(p.q.data) + batch * p.q.batch;
#pragma unroll 1
  for (int i = thread; i < C::kRows * kChunks; i += threads) {
    const int row = i / kChunks, chunk = i % kChunks;
    const int valid = row < rows.count ? max(min(p.head_dim - chunk * 8, 8), 0) : 0;
    const T* const from =
        data + rows.head(d, row) * p.q.head + (token + rows.query(d, row)) * p.q.row + chunk * 8;
    const uint32_t to = shared + tile_offset<C>(row, chunk);
    if (kLater && d.q_vectors) {
      sm80::copy_async(to, valid > 0 ? from : data, valid > 0 ? 16 : 0);
    } else {
      uint4 x = {0, 0, 0, 0};
      if (valid > 0)
        x = d.q_vectors ? *reinterpret_cast<const uint4*>(from) : sm80::load_elements(from, valid);
      sm80::store_shared(to, x);
    }
  }
}

// Q^T as the mma's B operand.
template <class C>
__device__ __forceinline__ void load_queries(const Lane& lane, uint32_t shared, Queries<C>& q) {
  const uint32_t from = shared + tile_offset<C>(lane.lane % 8, lane.lane / 8 % 2);
#pragma unroll
  for (int n = 0; n < C::kRowTiles; ++n) {
#pragma unroll
    for (int step = 0; step < C::kSteps; step += 2) {
      // Matrices 0 and 1 are those of `step`; lanes 16 and up address the next step's.
      uint32_t x[4];
      const uint32_t at = advance(from, 2 * step) ^ lane.lane / 16 * 32;
      sm80::load_matrices(x, at + n * 8 * C::kDim * 2);
      q[step][n][0] = x[0], q[step][n][1] = x[1];
      q[step + 1][n][0] = x[2], q[step + 1][n][1] = x[3];
    }
  }
}

// Where a lane finds rows for ldmatrix in a tile: lane l gives row l % 8 of matrix l / 8; of K keys
// 0-7 and 8-15 of 8 features, then of the next 8; of V 8 features and the next 8 of keys 0-7, then
// of keys 8-15.
template <class C>
struct TileLane {
  const uint32_t k, v;
  __device__ __forceinline__ explicit TileLane(int lane)
      : k(tile_offset<C>(lane % 8 + lane / 8 % 2 * 8, lane / 8 / 2)),
        v(C::kTileBytes + tile_offset<C>(lane % 8 + lane / 8 / 2 * 8, lane / 8 % 2)) {}
};

// Adds a tile, which stands at `stage`, to the rows' state. `missing`: it may lack pages. `beside`:
// is done while the scores are being made.
template <class T, class C, bool kCareful, class Beside>
__device__ __forceinline__ void attend_tile(const Problem& p, const Decode& d, const Lane& lane,
                                            const TileLane<C>& at, const Rows& rows,
                                            const Keys& keys, int tile, uint32_t stage,
                                            bool missing, const Queries<C>& q, RowState<C>& state,
                                            Beside beside) {
  const int first_key = tile * C::kKeys;
  Scores<C> scores;
  multiply_keys<T, C>(stage + at.k, q, scores);
  beside();
  float factor = d.factor;
  if (d.cap_out > 0.f || p.mask.data) {
    if (d.cap_out > 0.f) cap_scores<C>(d, scores), factor = 1.f;
    if (p.mask.data) {
      add_mask<C>(p, d, lane, rows, first_key, keys.range.limit, factor, scores);
      factor = 1.f;
    }
  }
  if (d.block_table && __any_sync(0xffffffffu, missing)) {
    const Loader<T, C> loader(p, d, rows.batch, rows.kv_head, keys.begin, keys.end);
    mask_missing_pages(loader, lane, first_key, scores);
  }
  if (first_key < keys.clear_begin || first_key + C::kKeys > keys.clear_end)
    apply_bounds<C>(d, keys.range, lane, rows, first_key, scores);
  raise_maxima<C>(scores, factor, state);
  if constexpr (kCareful) {
    Scores<C> masked;
#pragma unroll
    for (int n = 0; n < C::kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) masked[n][i] = scores[n][i];
    }
    exponentiate<C>(factor, scores, state);
    add_values_carefully<T, C>(lane, masked, scores, stage + C::kTileBytes, state);
  } else {
    exponentiate<C>(factor, scores, state);
    add_values<T, C>(scores, stage + at.v, state);
  }
}

}  // namespace flashonnx::decode

// The kernel: a cluster of blocks for each key head of a batch entry and up to kRows of its packed
// queries. Blocks share out the keys, and the warps of a block take turns in its tiles: each copies
// its own, several tiles ahead, so that nothing waits but for memory.
#pragma once

#include "kernels/decode/finish.cuh"

namespace flashonnx::decode {

template <class T, class C>
struct Block {
  const Problem& p;
  const Decode& d;
  const Lane lane;
  const Work work;
  const int queries;
  const Rows rows;
  KeyRange range;
  int begin, end;              // keys that any of the rows sees
  int clear_begin, clear_end;  // keys that all of them see
  int first_tile, last_tile;   // of this block: [first, last)

  __device__ __forceinline__ Block(const Problem& p, const Decode& d)
      : p(p),
        d(d),
        work(work_of(d, sm80::block_index())),
        queries(queries_of(p, d, work.batch)),
        rows{work.row_tile * C::kRows,
             min(rows_from(p, d, queries, work.row_tile * C::kRows), C::kRows), work.batch,
             work.kv_head} {
    range = range_of(p, d, queries, keys_of(p, d, work.batch));
    const int first = rows.query(d, 0), last = rows.query(d, rows.count - 1);
    begin = range.lower(first), end = range.upper(last);
    clear_begin = range.lower(last), clear_end = range.upper(first);
    const int from = begin / C::kKeys;
    const int tiles = end > begin ? (end - 1) / C::kKeys - from + 1 : 0;
    // Shares differ by a tile at most.
    const int part = work.partition * d.cluster.divisor + work.rank;
    const int share = d.parts.quotient(tiles), longer = tiles - share * d.parts.divisor;
    first_tile = from + part * share + min(part, longer);
    last_tile = first_tile + share + (part < longer ? 1 : 0);
  }
};

// Copies Q, all threads of the block together; rows that are not there become zeros.
template <class T, class C>
__device__ __forceinline__ void copy_queries(const Block<T, C>& block, uint32_t shared) {
  constexpr int kChunks = C::kDim / 8;
  const Problem& p = block.p;
  const Decode& d = block.d;
  const int64_t batch = d.first_queries ? 0 : block.work.batch;
  const int64_t token = d.first_queries ? d.first_queries[block.work.batch] : 0;
#pragma unroll 1
  for (int i = threadIdx.x; i < C::kRows * kChunks; i += blockDim.x) {
    const int row = i / kChunks, chunk = i % kChunks;
    uint4 x = {0, 0, 0, 0};
    const int valid = min(p.head_dim - chunk * 8, 8);
    if (row < block.rows.count && valid > 0) {
      const T* const from = static_cast<const T*>(p.q.data) + batch * p.q.batch +
                            block.rows.head(d, row) * p.q.head +
                            (token + block.rows.query(d, row)) * p.q.row + chunk * 8;
      x = d.q_vectors ? *reinterpret_cast<const uint4*>(from) : sm80::load_elements(from, valid);
    }
    sm80::store_shared(shared + tile_offset<C>(row, chunk), x);
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

template <class T, class C, bool kCareful>
__device__ __forceinline__ void walk(const Block<T, C>& block, const Shared<C>& shared,
                                     RowState<C>& state) {
  const Problem& p = block.p;
  const Decode& d = block.d;
  const Lane& lane = block.lane;
  const Loader<T, C> loader(p, d, block.work, block.begin, block.end);
  const uint32_t ring = sm80::shared_address(shared.rings) + lane.warp * C::kRingBytes;
  const int step = d.warps;
  int tile = block.first_tile + lane.warp, ahead = tile;
  // Whether nothing that the ring takes at first is appended by the kernel before.
  const int first_end = min(tile + (C::kStages - 1) * step + 1, block.last_tile);
  const bool early = d.early && first_end * C::kKeys <= block.end - d.added;
  if (!kCareful && !early) wait_for_predecessor();
  const auto first_pages = loader.first_pages(ahead, step);
  bool missing = false;  // a page, in this tile or one before
#pragma unroll 1
  for (int stage = 0; stage < C::kStages; ++stage) {
    const int32_t page_of_stage = loader.page_of_stage(first_pages, stage);
    if (ahead < block.last_tile)
      missing |= !loader.copy(p, ahead, page_of_stage, ring + stage * C::kStageBytes);
    commit_copies();
    ahead += step;
  }
  if (!kCareful && early) wait_for_predecessor();
  int32_t page = loader.page_of_tile(ahead);
  Queries<C> q;
  if (!kCareful) {
    copy_queries(block, shared.queries);
    __syncthreads();
  }
  load_queries<C>(lane, shared.queries, q);
  clear<C>(state);
  // Lane l gives ldmatrix row l % 8 of matrix l / 8: of K keys 0-7 and 8-15 of 8 features, then of
  // the next 8; of V 8 features and the next 8 of keys 0-7, then of keys 8-15.
  const int row = lane.lane % 8, matrix = lane.lane / 8;
  const uint32_t lane_k = tile_offset<C>(row + matrix % 2 * 8, matrix / 2);
  const uint32_t lane_v = C::kTileBytes + tile_offset<C>(row + matrix / 2 * 8, matrix % 2);
  const bool general = d.cap_out > 0.f || p.mask.data;
  uint32_t stage = ring;
#pragma unroll 1
  for (; tile < block.last_tile; tile += step) {
    const int first_key = tile * C::kKeys;
    wait_copies<C::kStages - 1>();
    __syncwarp();
    Scores<C> scores;
    multiply_keys<T, C>(stage + lane_k, q, scores);
    float factor = d.factor;
    if (general) {
      if (d.cap_out > 0.f) cap_scores<C>(d, scores), factor = 1.f;
      if (p.mask.data) {
        add_mask<C>(p, d, lane, block.rows, first_key, block.range.limit, factor, scores);
        factor = 1.f;
      }
    }
    if (d.block_table && __any_sync(0xffffffffu, missing))
      mask_missing_pages(loader, lane, first_key, scores);
    if (first_key < block.clear_begin || first_key + C::kKeys > block.clear_end)
      apply_bounds<C>(d, block.range, lane, block.rows, first_key, scores);
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
      add_values<T, C>(scores, stage + lane_v, state);
    }
    __syncwarp();
    if (ahead < block.last_tile) missing |= !loader.copy(p, ahead, page, stage);
    commit_copies();
    ahead += step;
    page = loader.page_of_tile(ahead);
    stage += C::kStageBytes;
    if (stage == ring + C::kRingBytes) stage = ring;
  }
}

// A warp whose outputs hold a NaN or an infinity walks over its keys once more. A function of its
// own, so that its needs do not show in the registers of the other walk.
template <class T, class C>
__device__ __noinline__ void attend_carefully(const Problem& p, const Decode& d,
                                              unsigned char* memory) {
  const Block<T, C> block(p, d);
  const Shared<C> shared(memory, d.warps);
  RowState<C> state;
  walk<T, C, true>(block, shared, state);
  publish<C>(block.lane, state, reinterpret_cast<float*>(shared.rings), shared.sums);
}

template <class T, class C>
__global__ void __launch_bounds__(32 * C::kMaxWarps, 1)
    attend(const __grid_constant__ Problem p, const __grid_constant__ Decode d) {
  unsigned char* const memory = sm80::shared_memory();
  // What does not read memory is done before: see Grid::overlap.
  if (!d.early && (p.key_lengths || d.first_queries || d.first_keys)) wait_for_predecessor();
  const Block<T, C> block(p, d);
  if (block.rows.count <= 0) return;  // the whole cluster, which has waited
  const Shared<C> shared(memory, d.warps);
  if (d.cluster.divisor > 1) {
    if (threadIdx.x == 0) expect_from_cluster<C>(d, block.work, block.rows, shared);
    cluster_arrive();
  }
  {
    RowState<C> state;
    walk<T, C, false>(block, shared, state);
    let_dependents_launch();  // not before: until now there is no room for them
    const bool may_be_masked =
        p.mask.data || block.clear_begin > block.begin || block.clear_end < block.end;
    if (may_be_masked && __any_sync(0xffffffffu, holds_nonfinite<C>(state))) {
      attend_carefully<T, C>(p, d, memory);
    } else {
      publish<C>(block.lane, state, reinterpret_cast<float*>(shared.rings), shared.sums);
    }
  }
  const int token = d.first_queries ? d.first_queries[block.work.batch] : 0;
  finish<T, C>(p, d, block.work, block.rows, token, shared);
}

}  // namespace flashonnx::decode

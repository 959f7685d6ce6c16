// The kernel: a cluster of blocks for each key head of a batch entry and up to kRows of its packed
// queries. Blocks share out the keys, and the warps of a block take turns in its tiles: each copies
// its own, several tiles ahead, so that nothing waits but for memory.
#pragma once

#include "kernels/decode/finish.cuh"

namespace flashonnx::decode {

// What a warp has to know. What does not depend on lengths comes first, while they are on their
// way.
template <class T, class C>
struct Block {
  const Problem& p;
  const Decode& d;
  const Lane lane;
  const Work work;
  const int32_t given;  // of the two GivenKeys one by even lanes, one by odd ones
  Loader<T, C> loader;
  // All warps of all parts take turns in the unit's tiles, so where one begins does not depend on
  // lengths, but for windows.
  const int step;
  int tile;
  typename Loader<T, C>::FirstPages pages;
  const int queries;
  const Rows rows;
  Keys keys;
  int last_tile;

  __device__ __forceinline__ Block(const Problem& p, const Decode& d)
      : p(p),
        d(d),
        work(work_of(d, sm80::block_index())),
        given(given_keys(p, d, work.batch, lane.lane % 2)),
        loader(p, d, work.batch, work.kv_head),
        step(d.parts.divisor * d.warps),
        tile(work.partition * d.cluster.divisor + work.rank + lane.warp * d.parts.divisor),
        pages(loader.first_pages(tile, step)),
        queries(queries_of(p, d, work.batch)),
        rows{work.row_tile * C::kRows,
             min(rows_from(p, d, queries, work.row_tile * C::kRows), C::kRows), work.batch,
             work.kv_head} {}

  __device__ __forceinline__ void find_keys() {
    const GivenKeys told = {__shfl_sync(0xffffffffu, given, 0), __shfl_sync(0xffffffffu, given, 1)};
    keys = Keys(p, d, rows, queries, keys_of(p, d, told));
    loader.stay_within(keys.begin, keys.end);
    last_tile = keys.first_tile + keys.tiles;
    if (keys.first_tile == 0) return;
    tile += keys.first_tile;
    pages = loader.first_pages(tile, step);
  }
};

// Whether Q comes with the first copies: before all others, as its request would wait behind them.
// Not what the kernel before writes, nor rows that are no whole vectors.
__device__ __forceinline__ bool queries_come_first(const Decode& d) {
  return d.q_vectors && !d.late_queries;
}

// `begun`: is done when the first copies are on their way.
template <class T, class C, bool kCareful, class Begun>
__device__ __forceinline__ void walk(const Block<T, C>& block, const Shared<C>& shared,
                                     RowState<C>& state, Begun begun) {
  const Problem& p = block.p;
  const Decode& d = block.d;
  const Lane& lane = block.lane;
  const Loader<T, C>& loader = block.loader;
  const uint32_t ring = sm80::shared_address(shared.rings) + lane.warp * C::kRingBytes;
  const int step = block.step;
  int tile = block.tile, ahead = tile;
  // Only tiles from here on hold keys which the kernel before appends: for others nobody waits, as
  // that one is slow while so much is being read.
  const int new_tile = (block.keys.end - d.added) / C::kKeys;
  bool missing = false;  // a page, in this tile or one before
#pragma unroll 1
  for (int stage = 0; stage < C::kStages; ++stage) {
    const int32_t page_of_stage = loader.page_of_stage(block.pages, stage);
    if (ahead < block.last_tile) {
      const auto place = loader.place_of(ahead, page_of_stage);
      missing |= place.missing;
      if (!kCareful && ahead >= new_tile) wait_for_predecessor();
      loader.copy(p, place, ring + stage * C::kStageBytes);
    }
    commit_copies();
    ahead += step;
  }
  begun();
  loader.keep_pages(block.pages, ring + C::kPagesAt);
  Queries<C> q;
  if (!kCareful) {
    if (queries_come_first(d)) {
      wait_copies<C::kStages>();
    } else {
      wait_for_predecessor();
      copy_queries<T, C, false>(p, d, block.rows, threadIdx.x, blockDim.x, shared.queries);
    }
    __syncthreads();
  }
  load_queries<C>(lane, shared.queries, q);
  clear<C>(state);
  const TileLane<C> at(lane.lane);
  uint32_t stage = ring, kept = ring + C::kPagesAt;
  bool waited = kCareful;
#pragma unroll 1
  for (; tile < block.last_tile; tile += step) {
    wait_copies<C::kStages - 1>();
    __syncwarp();
    const int32_t page = loader.kept_page(kept);
    typename Loader<T, C>::Place place;
    attend_tile<T, C, kCareful>(p, d, lane, at, block.rows, block.keys, tile, stage, missing, q,
                                state, [&] { place = loader.place_of(ahead, page); });
    __syncwarp();
    if (ahead < block.last_tile) {
      if (!waited) wait_for_predecessor(), waited = true;
      missing |= place.missing;
      loader.copy(p, place, stage);
    }
    ahead += step;
    const int later = ahead + (C::kStages - 1) * step;
    if (later < block.last_tile) loader.ask_for_page(later, kept);
    commit_copies();
    stage += C::kStageBytes, kept += C::kPageBytes;
    if (stage == ring + C::kPagesAt) stage = ring, kept = stage + C::kPagesAt;
  }
}

// A warp whose outputs hold a NaN or an infinity walks over its keys once more. A function of its
// own, so that its needs do not show in the registers of the other walk.
template <class T, class C>
__device__ __noinline__ void attend_carefully(const Problem& p, const Decode& d,
                                              unsigned char* memory) {
  Block<T, C> block(p, d);
  block.find_keys();
  const Shared<C> shared(memory, d.warps);
  RowState<C> state;
  walk<T, C, true>(block, shared, state, [] {});
  publish<C>(block.lane, state, reinterpret_cast<float*>(shared.rings), shared.sums);
}

template <class T, class C>
__global__ void __launch_bounds__(32 * C::kMaxWarps, 1)
    attend(const __grid_constant__ Problem p, const __grid_constant__ Decode d) {
  unsigned char* const memory = sm80::shared_memory();
  // What does not read memory is done before the wait: see Grid::overlap.
  const bool told = p.key_lengths || d.first_queries || d.first_keys || d.block_table;
  if (!d.early && told) wait_for_predecessor();
  Block<T, C> block(p, d);
  if (block.rows.count <= 0) return;  // the whole cluster, which has waited
  const Shared<C> shared(memory, d.warps);
  const auto ask = [&] {
    if (!queries_come_first(d)) return;
    copy_queries<T, C, true>(p, d, block.rows, threadIdx.x, blockDim.x, shared.queries);
    commit_copies();
  };
  if (told) ask();
  block.find_keys();
  if (!told) {
    wait_for_predecessor();
    ask();
  }
  {
    RowState<C> state;
    walk<T, C, false>(block, shared, state, [&] {
      if (d.cluster.divisor == 1) return;
      if (threadIdx.x == 0) expect_from_cluster<C>(d, block.work, block.rows, shared);
      cluster_arrive();
    });
    wait_for_predecessor();   // as others wait for this kernel alone
    let_dependents_launch();  // not before: until now there is no room for them
    if (may_be_masked(p, block.keys) && __any_sync(0xffffffffu, holds_nonfinite<C>(state))) {
      attend_carefully<T, C>(p, d, memory);
    } else {
      publish<C>(block.lane, state, reinterpret_cast<float*>(shared.rings), shared.sums);
    }
  }
  const int token = d.first_queries ? d.first_queries[block.work.batch] : 0;
  finish<T, C>(p, d, block.work, block.rows, token, shared);
}

}  // namespace flashonnx::decode

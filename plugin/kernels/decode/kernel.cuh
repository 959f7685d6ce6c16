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
  const Keys keys;
  int first_tile, last_tile;  // of this block: [first, last)

  __device__ __forceinline__ Block(const Problem& p, const Decode& d)
      : p(p),
        d(d),
        work(work_of(d, sm80::block_index())),
        queries(queries_of(p, d, work.batch)),
        rows{work.row_tile * C::kRows,
             min(rows_from(p, d, queries, work.row_tile * C::kRows), C::kRows), work.batch,
             work.kv_head},
        keys(p, d, rows, queries, keys_of(p, d, work.batch)) {
    // Shares differ by a tile at most.
    const int part = work.partition * d.cluster.divisor + work.rank;
    const int share = d.parts.quotient(keys.tiles), longer = keys.tiles - share * d.parts.divisor;
    first_tile = keys.first_tile + part * share + min(part, longer);
    last_tile = first_tile + share + (part < longer ? 1 : 0);
  }
};

template <class T, class C, bool kCareful>
__device__ __forceinline__ void walk(const Block<T, C>& block, const Shared<C>& shared,
                                     RowState<C>& state) {
  const Problem& p = block.p;
  const Decode& d = block.d;
  const Lane& lane = block.lane;
  const Loader<T, C> loader(p, d, block.work.batch, block.work.kv_head, block.keys.begin,
                            block.keys.end);
  const uint32_t ring = sm80::shared_address(shared.rings) + lane.warp * C::kRingBytes;
  const int step = d.warps;
  int tile = block.first_tile + lane.warp, ahead = tile;
  // Keys of the first tiles that were there before those which the kernel before appends.
  const int first_end = min(tile + (C::kStages - 1) * step + 1, block.last_tile);
  const bool early = d.early && first_end * C::kKeys <= block.keys.end - d.added;
  if (!kCareful && !early) wait_for_predecessor();
  const auto first_pages = loader.template first_pages<2 * C::kStages>(ahead, step);
  bool missing = false;  // a page, in this tile or one before
#pragma unroll 1
  for (int stage = 0; stage < C::kStages; ++stage) {
    const int32_t page_of_stage = loader.page_of_stage(first_pages, stage);
    if (ahead < block.last_tile) {
      const auto place = loader.place_of(ahead, page_of_stage);
      missing |= place.missing;
      loader.copy(p, place, ring + stage * C::kStageBytes);
    }
    commit_copies();
    ahead += step;
  }
  if (!kCareful && early) wait_for_predecessor();
  loader.keep_pages(first_pages, ring + C::kPagesAt);
  Queries<C> q;
  if (!kCareful) {
    copy_queries<T, C>(p, d, block.rows, threadIdx.x, blockDim.x, shared.queries);
    __syncthreads();
  }
  load_queries<C>(lane, shared.queries, q);
  clear<C>(state);
  const TileLane<C> at(lane.lane);
  uint32_t stage = ring, kept = ring + C::kPagesAt;
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
  prefetch_pages(p, d, work_of(d, sm80::block_index()).batch);
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

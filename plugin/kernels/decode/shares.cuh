// The kernel where units do not divide evenly over the device, or are of uneven lengths: the tiles
// of all units one after the other, in equal shares for all warps of the device. A warp's copies
// run on from one unit to the next; of each it leaves its part in the workspace, for
// `combine_shares`.
#pragma once

#include "kernels/decode/deal.cuh"
#include "kernels/decode/finish.cuh"

namespace flashonnx::decode {

// A warp's sums of a part to the workspace.
template <class C>
__device__ __forceinline__ void store_part(const Decode& d, const Lane& lane, const Rows& rows,
                                           int share, const RowState<C>& state) {
  static_assert(C::kRowTiles == 1);
  const int64_t at = part_at(d, share, rows.batch, rows.kv_head);
  float4* const outputs = reinterpret_cast<float4*>(d.partial_outputs + at * C::kDim);
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int row = lane.quad * 2 + e;
    const float sum = reduce_lanes<4>(state.sum[0][e], [](float a, float b) { return a + b; });
    if (row >= rows.count) continue;
    if (lane.column == 0) d.partial_sums[at + row] = {state.maximum[0][e], sum};
#pragma unroll
    for (int i = 0; i < C::kSteps; i += 2) {
      outputs[(i / 2 * d.rows + row) * 8 + lane.column] = {
          state.output[i][0][e], state.output[i][0][2 + e], state.output[i + 1][0][e],
          state.output[i + 1][0][2 + e]};
    }
  }
}

// As attend_carefully: tiles [tile, last) of a unit once more. The ring is left empty.
template <class T, class C>
__device__ __noinline__ void attend_part_carefully(const Problem& p, const Decode& d, int batch,
                                                   int kv_head, int share, int tile, int last,
                                                   uint32_t ring, uint32_t queries) {
  const Lane lane;
  const TileLane<C> at(lane.lane);
  const Unit unit = Lengths(p, d, C::kRows).unit(p, d, batch, kv_head);
  const Loader<T, C> loader(p, d, batch, kv_head, unit.keys.begin, unit.keys.end);
  Queries<C> q;
  RowState<C> state;
  wait_copies<0>();  // those of the other walk
  __syncwarp();
  copy_queries<T, C, false>(p, d, unit.rows, lane.lane, 32, queries);
  __syncwarp();
  load_queries<C>(lane, queries, q);
  clear<C>(state);
  bool missing = false;
#pragma unroll 1
  for (; tile < last; ++tile) {
    const auto place = loader.place_of(tile, loader.page_of_tile(tile));
    missing |= place.missing;
    loader.copy(p, place, ring);
    commit_copies();
    wait_copies<0>();
    __syncwarp();
    attend_tile<T, C, true>(p, d, lane, at, unit.rows, unit.keys, tile, ring, missing, q, state,
                            [] {});
    __syncwarp();
  }
  store_part<C>(d, lane, unit.rows, share, state);
}

// Copies of a warp's tiles to its ring, from one unit to the next, ahead of what is computed.
template <class T, class C>
struct Stream {
  const Problem& p;
  const Decode& d;
  const Lengths& lengths;
  Unit unit;
  int tile, left;
  Loader<T, C> loader;
  int32_t page = 0;      // of the lane's key of `tile`
  bool missing = false;  // a page, in a tile so far

  __device__ __forceinline__ Stream(const Problem& p, const Decode& d, const Lengths& lengths,
                                    const Unit& unit, int tile, int left, uint32_t ring)
      : p(p),
        d(d),
        lengths(lengths),
        unit(unit),
        tile(tile),
        left(left),
        loader(p, d, unit.rows.batch, unit.rows.kv_head, unit.keys.begin, unit.keys.end) {
    const auto pages = loader.first_pages(tile, 1);
    const int of_unit = unit.last_tile() - tile;
#pragma unroll 1
    for (int stage = 0; stage < C::kStages; ++stage) {
      const int32_t page_of_stage = loader.page_of_stage(pages, stage);
      if (stage < of_unit) page = page_of_stage;
      copy_next(ring + stage * C::kStageBytes);
    }
  }

  __device__ __forceinline__ void copy_next(uint32_t stage) {
    if (left > 0) {
      const auto place = loader.place_of(tile, page);
      missing |= place.missing;
      loader.copy(p, place, stage);
      --left, ++tile;
      if (left > 0 && tile == unit.last_tile()) {
        unit = lengths.after(p, d, unit);
        tile = unit.keys.first_tile;
        loader.move_to(p, unit.rows.batch, unit.rows.kv_head, unit.keys.begin, unit.keys.end);
      }
      page = loader.page_of_tile(tile);
    }
    commit_copies();
  }
};

template <class T, class C>
__global__ void __launch_bounds__(32 * C::kMaxWarps, 1)
    attend_shares(const __grid_constant__ Problem p, const __grid_constant__ Decode d) {
  const Lane lane;
  const TileLane<C> at(lane.lane);
  const uint32_t queries =
      sm80::shared_address(sm80::shared_memory()) + lane.warp * (C::kRingBytes + C::kQueryBytes);
  const uint32_t ring = queries + C::kQueryBytes;
  if (!d.early && (p.key_lengths || d.first_queries || d.first_keys)) wait_for_predecessor();
  const Lengths lengths(p, d, C::kRows);
  // Warps of a block have shares far from each other, as the first ones are a tile longer.
  const int index = lane.warp * gridDim.x + blockIdx.x;
  const Share share = share_of(d, lengths, index);
  int left = share.tiles;
  if (left == 0) {
    wait_for_predecessor();  // as others wait for this kernel alone
    return;
  }
  Unit unit = lengths.unit(p, d, share.batch, share.kv_head);
  int tile = unit.keys.first_tile + share.offset;
  // As in walk: nothing that the ring takes at first was appended by the kernel before.
  const bool early = d.early && tile + C::kStages <= unit.last_tile() &&
                     (tile + C::kStages) * C::kKeys <= unit.keys.end - d.added;
  if (!early) wait_for_predecessor();
#pragma unroll 1
  while (left > 0) {
    if (!early) copy_queries<T, C, true>(p, d, unit.rows, lane.lane, 32, queries);
    Stream<T, C> ahead(p, d, lengths, unit, tile, left, ring);
    if (early) {
      wait_for_predecessor();
      copy_queries<T, C, true>(p, d, unit.rows, lane.lane, 32, queries);
      commit_copies();
      wait_copies<0>();
    }
    let_dependents_launch();  // there is room for `combine_shares`
    uint32_t stage = ring;
    bool careful = false, there = early;
#pragma unroll 1
    while (left > 0 && !careful) {
      const int first = tile, last = min(unit.last_tile(), tile + left);
      left -= last - tile;
      Queries<C> q;
      RowState<C> state;
      // Q was asked for with the first tile of the part before, or of the ring.
      if (!there) wait_copies<C::kStages - 1>();
      __syncwarp();
      load_queries<C>(lane, queries, q);
      __syncwarp();
      Unit next = unit;
      if (left > 0) {
        next = lengths.after(p, d, unit);
        copy_queries<T, C, true>(p, d, next.rows, lane.lane, 32, queries);
      }
      clear<C>(state);
#pragma unroll 1
      for (; tile < last; ++tile) {
        wait_copies<C::kStages - 1>();
        __syncwarp();
        attend_tile<T, C, false>(p, d, lane, at, unit.rows, unit.keys, tile, stage, ahead.missing,
                                 q, state, [] {});
        __syncwarp();
        ahead.copy_next(stage);
        stage += C::kStageBytes;
        if (stage == ring + C::kPagesAt) stage = ring;
      }
      there = last - first < C::kStages;
      if (there) wait_copies<0>();
      careful = may_be_masked(p, unit.keys) && __any_sync(0xffffffffu, holds_nonfinite<C>(state));
      if (careful) {
        attend_part_carefully<T, C>(p, d, unit.rows.batch, unit.rows.kv_head, index, first, last,
                                    ring, queries);
      } else {
        store_part<C>(d, lane, unit.rows, index, state);
      }
      unit = next;
      tile = unit.keys.first_tile;
    }
  }
}

}  // namespace flashonnx::decode

// Which step tiles of keys take: consumers walk over runs of tiles that take the same.
#pragma once

#include <climits>

#include "kernels/sm90/softmax.cuh"
#include "kernels/sm90/visible.cuh"

namespace flashonnx::sm90 {

// Whether V has rows past the entry's length: gathered, in the last tile, the next one's.
template <class C>
__device__ __forceinline__ bool ends_early(const Problem& p, const Span& span) {
  return span.range.limit < (C::kGathered ? (span.last_tile + 1) * C::kKeys : p.key_length);
}

// In kernels that have no register left more is read and made anew.
template <class C>
constexpr bool kShort = C::kGeneral && C::kGroups == 3;

// The last tile of keys that a group sees, which is `mine`, or any group does: that spares a
// register, and is as good.
template <class C>
__device__ __forceinline__ int last_of(const ItemOf<C>& item, int mine) {
  return C::kMarks && !kShort<C> ? mine : item.span.last_tile;
}

// Of a consumer warpgroup and its tile of queries. `last_tile` is the last one that it sees.
template <class C>
struct Runs {
  const Problem& p;
  const PackedMask* packed;
  bool has_bits;
  const Shared<C>& shared;
  const PackedRing<C::kQueryStages>& queries;
  Lane lane;
  int last_tile;

  // Read from shared memory each time, which spares registers.
  __device__ __forceinline__ const ItemOf<C>& item() const { return *shared.item(queries.stage()); }

  // Goes on to the next tile that is not hidden. Returns how many from there on are either biased
  // or not; none if one was left out and the values of the tile before need a look at bounds, or
  // with weights, as steps without count on a maximum of each row.
  __device__ __forceinline__ int next_visible(int& tile, bool& biased) const {
    const Marks& marks = item().marks;
    if (!C::kGeneral && marks.row.uniform) {
      biased = marks.row.biased;
      return INT_MAX;
    }
    const int visible = last_visible(marks.visible, tile, item().span.first_tile);
    const bool skips = visible != tile;
    tile = visible;
    bool has_biases;
    const int run = visible_run(marks, tile, &has_biases);
    if (!C::kGeneral) biased = has_biases;
    return skips && (C::kWeights || ends_early<C>(p, item().span)) ? 0 : run;
  }

  // How many tiles from this one on need no look at bounds, nor do the values of those after them.
  // Made anew each time, which spares registers.
  __device__ __forceinline__ int plain_tiles(int tile) const {
    const Span& span = item().span;
    const int first_query = item().work.first_query + lane.group * 64;
    const int last_query = min(first_query + 63, queries_of<C>(p, item()) - 1);
    const int begin = (span.range.lower(last_query) + C::kKeys - 1) / C::kKeys;
    // The first query has met a key before, too: plain steps count on a maximum.
    const int end = min((span.range.upper(first_query) - 1) / C::kKeys,
                        last_of<C>(item(), last_tile) - (ends_early<C>(p, span) ? 1 : 0));
    return tile < end ? tile - max(begin, span.first_tile) + 1 : 0;
  }

  // Of how many of `count` tiles the scores will not exceed the maxima by much, so that P may be
  // made first, maxima then; none where it is not so of the first. A group finds it out together,
  // as it takes its steps.
  __device__ __forceinline__ int near_tiles(int tile, int count, bool biased,
                                            const RowState& state) const {
    if (item().marks.row.steady || (biased && has_bits && !C::kPacksEarly)) return count;
    float top = 0.f;
    if (biased && !has_bits) {
      // Those whose largest biases do not lie far above the first one's.
      constexpr float kStep = 8.f;
      const float* const tops =
          packed->top + int64_t{item().marks.row.index} * packed->key_tiles + tile;
      count = min(count, 32);
      const float at = lane.lane < count ? __ldg(tops - lane.lane) : INFINITY;
      top = __shfl_sync(0xffffffffu, at, 0) + kStep;
      const uint32_t others = ~__ballot_sync(0xffffffffu, at <= top);
      if (others != 0) count = __ffs(others) - 1;
    }
    return named_all(1 + C::kGroups + lane.group, 128, is_near(top, state)) ? count : 0;
  }
};

}  // namespace flashonnx::sm90

// Tile shapes, for buckets of head dimensions: the larger of D and Dv is rounded up to one
// (launch.cpp says which), and the copy engine fills what is missing of either with zeros.
//
// A block has one producer warpgroup and kGroups consumer warpgroups of 64 queries each, which
// share the tiles of K and V. It stays on its multiprocessor and takes one tile of queries after
// another.
#pragma once

#include <cstdint>

namespace flashonnx::sm90 {

// The masks that a kernel sees to: none; those of keys or bits (packed_mask.h); all, and a soft
// cap; weights (weights.cuh).
enum class Masks { kNone, kPacked, kGeneral, kWeights };

// Where a tile of K or V stands in shared memory, in 16 bytes: from 8 rows to the next ones, and
// from a box of features to the next.
struct Layout {
  uint32_t rows, box;
};

// How shared memory is dealt out.
struct Stages {
  int keys;     // of a tile
  int tiles;    // of K, and of V, that are under way or in use
  int queries;  // as well, tiles of Q
};

// A tile has as many keys, up to 128, as let two tiles of K and V stand beside one of Q. Then there
// are as many of them, up to four, as leave room for another of Q; and of Q up to `most_queries`:
// rows leave through their place while the next are in use and those after them come.
constexpr Stages stages_of(int bytes, int query_bytes, int bytes_of_key, int most_queries) {
  const auto fit = [&](int keys, int tiles, int queries) {
    return tiles * keys * bytes_of_key + queries * query_bytes <= bytes;
  };
  Stages stages = {128, 2, 1};
  while (!fit(stages.keys, 2, 1)) stages.keys -= 32;
  while (stages.tiles < 4 && fit(stages.keys, stages.tiles + 1, 2)) ++stages.tiles;
  while (stages.queries < most_queries && fit(stages.keys, stages.tiles, stages.queries + 1))
    ++stages.queries;
  return stages;
}

template <int kDim_, int kGroups_ = 2, Masks kMasks_ = Masks::kNone, int kValueDim_ = kDim_>
struct Tiling {
  static constexpr int kDim = kDim_;            // of Q and K
  static constexpr int kValueDim = kValueDim_;  // of V and the output
  static constexpr int kGroups = kGroups_;
  static constexpr int kQueries = 64 * kGroups;
  static constexpr int kThreads = 128 * (kGroups + 1);

  // The general kernel: soft cap, and masks that depend on the query, which come with K.
  static constexpr bool kGeneral = kMasks_ == Masks::kGeneral;
  static constexpr bool kPackedMasks = kMasks_ == Masks::kPacked;
  static constexpr bool kWeights = kMasks_ == Masks::kWeights;
  static constexpr bool kMarks = kMasks_ != Masks::kNone;  // may skip tiles of keys
  static constexpr bool kGathered = false;
  static constexpr int kQueryArrivals = 1;  // until a tile of queries is there
  static constexpr bool kBiased = false;

  // Registers of a thread: 65536 for all. Softmax and output live in the consumers'.
  static constexpr int kProducerRegisters = kGroups == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kGroups == 2 ? 232 : 160;
  static_assert(128 * (kProducerRegisters + kGroups * kConsumerRegisters) <= 65536);

  // P is summed up by the tensor cores, as a product with a tile of ones: they have time left at
  // head size 64, where warps are short of issue slots.
  static constexpr bool kOnes = kDim == 64 && !kGeneral;
  // With weights they have to be, as P gets its weight when it is packed: by small products of
  // their own where the column of ones has no place beside V.
  static constexpr bool kOnesApart = kWeights && !kOnes;
  static constexpr bool kSumsByProducts = kOnes || kOnesApart;

  // Biases of keys are one more product of Q K^T: 16 more features, of which Q's are constants and
  // K's the parts of the bias.
  static constexpr bool kBiasProduct = kPackedMasks;
  static constexpr int kBiasBytes = kBiasProduct ? 16 : kWeights ? 0 : 4;

  // A swizzled box of the copy engine has rows of 128 bytes, or of 64 where the head dimension asks
  // for it; a tile is kDim / kBox boxes side by side, of V kValueDim / kBox.
  static constexpr int kBox = kDim % 64 == 0 ? 64 : 32;
  static constexpr int kBoxes = kDim / kBox;
  static constexpr int kValueBoxes = kValueDim / kBox;
  static_assert(kValueDim % kBox == 0 && kValueDim <= kDim);  // the output goes to Q's place
  static constexpr int kBoxRow = kBox * 2;                    // bytes

  // Shared memory, in bytes. Dynamic one need not begin at a multiple of what swizzling asks for.
  static constexpr int kAlignment = 1024;
  static constexpr int kMostBytes = 227 * 1024 - kAlignment;
  static constexpr int kQueryBytes = kQueries * kDim * 2;
  static constexpr int kOnesBytes = kOnes ? 16 * kBoxRow : kOnesApart ? 128 : 0;
  static constexpr int kFactorBytes = kBiasProduct ? 128 : 0;
  // What compute-sanitizer takes for read by the product with biases, of which a few bytes are read
  // again and again, lies inside.
  static constexpr int kSpareBytes = kBiasProduct ? 2048 : 0;
  // Beside tiles; barriers and what is to be done fill no more than the last kilobyte.
  static constexpr int kOtherBytes =
      (kWeights ? kQueries * 128 * 2 : 0) + kOnesBytes + kFactorBytes + kSpareBytes + 1024;
  // At head size 96, a third tile of Q costs 2 % of 4096 tokens.
  static constexpr Stages kPlaces = stages_of(
      kMostBytes - kOtherBytes, kQueryBytes,
      (kDim + kValueDim + (kGeneral ? kQueries : 0)) * 2 + kBiasBytes, kDim == 96 ? 2 : 3);
  static constexpr int kKeys = kPlaces.keys;
  static constexpr int kStages = kPlaces.tiles;
  static constexpr int kQueryStages = kPlaces.queries;
  static constexpr int kKeyBytes = kKeys * kDim * 2;
  static constexpr int kValueBytes = kKeys * kValueDim * 2;
  static constexpr int kMaskBytes = kGeneral ? kQueries * kKeys * 2 : 0;
  static constexpr int kWeightBytes = kWeights ? 64 * kKeys * 2 : 0;  // of a group, which has one
  static_assert(!kGeneral || kKeys % 64 == 0);

  // Warpgroups take turns at the tensor cores, so that the softmax of one runs beside the products
  // of another; but where they were measured to be slower for it.
  static constexpr bool kTurns = kGeneral ? kDim <= 128 : kWeights ? kDim == 64 : kValueDim != 192;

  // Exponentials of keys that the diagonal hides from a whole warp are left out. Elsewhere it costs
  // registers (three groups, head size 128) or gains nothing (256).
  static constexpr bool kLeavesOutHidden = kDim == 64 && kGroups == 2 && !kMarks;

  // What is rare at the end of a tile of queries has one copy, behind all that is common. With
  // masks that makes ptxas spill; at head size 64 it costs 2 % of 512 causal tokens, in dense
  // kernels alone.
  static constexpr bool kSharesSlowEnd = !kMarks && kDim != 64;

  // Sums of P say whether a maximum was too low, and half of P of plain tiles is packed beside the
  // exponentials. Without turns groups would fall into step more often (docs: two rhythms), and
  // head size 256 gains nothing by packing.
  static constexpr bool kSumsBound = kTurns && !kOnes && !kGeneral && !kWeights;
  static constexpr bool kPacksEarly = kSumsBound && kDim < 256;

  // Exponentials of a plain tile that a thread makes before its group's turn ends. Two groups at
  // head size 64 take less than half of a step to issue products, and may then stay so close behind
  // each other that they make exponentials at the same time (docs: two rhythms).
  static constexpr int kBeforeTurn = kOnes && kGroups == 2 && !kMarks ? 16 : 0;

  // Queries are copied to registers, where there are some left.
  static constexpr bool kHoldsQueries = kDim == 128 && !kGeneral;

  // A layout: box after box. Pages may come as whole rows.
  static constexpr uint32_t kRowsApart = 8 * kBoxRow / 16, kBoxesApart = kKeys * kBoxRow / 16;

  static constexpr int kScores = kKeys / 2;  // of a thread
  static constexpr int kOutputs = kValueDim / 2 + (kSumsByProducts ? 4 : 0);

  // Where things stand: the stages of Q, K and V, of a mask, weights, a bias per key of each stage,
  // barriers, what is to be done with each stage of Q, and two places of what was found
  // (visible.cuh).
  static constexpr int kMaskAt = kQueryStages * kQueryBytes + kStages * (kKeyBytes + kValueBytes);
  static constexpr int kWeightsAt = kMaskAt + kStages * kMaskBytes;
  static constexpr int kOnesAt = kWeightsAt + kGroups * kWeightBytes;
  static constexpr int kBiasAt = kOnesAt + kOnesBytes;
  static constexpr int kFactorsAt = kBiasAt + kStages * kKeys * kBiasBytes;
  static constexpr int kBarriersAt = kFactorsAt + kFactorBytes;
  static constexpr int kBarriers =
      2 * kQueryStages + 4 * kStages + (kWeights ? 2 * kGroups : 0) + 2 * 2;
  static constexpr int kItemBytes = 160;
  static constexpr int kItemsAt = kBarriersAt + (kBarriers * 8 + kStages * 4 + 15) / 16 * 16;
  static constexpr int kFoundAt = kItemsAt + kQueryStages * kItemBytes;
  static constexpr int kSharedBytes = kFoundAt + 2 * kItemBytes + kSpareBytes;
  static_assert(kSharedBytes <= kMostBytes);
};

// In comments: queries and keys of a tile, tiles of K and V, tiles of Q.
using Tiling64 = Tiling<64, 3>;                           // 192 x 128, 4, 3
using Short64 = Tiling<64>;                               // 128 x 128, 4, 3
using Tiling96 = Tiling<96>;                              // 128 x 128, 3, 2
using Tiling128 = Tiling<128>;                            // 128 x 128, 2, 3
using Tiling192 = Tiling<192>;                            // 128 x  96, 2, 1
using Tiling192x128 = Tiling<192, 2, Masks::kNone, 128>;  // 128 x 128, 2, 1
using Tiling256 = Tiling<256>;                            // 128 x  64, 2, 1
// With a mask of keys, or one that is packed to bits.
using Masked64 = Tiling<64, 3, Masks::kPacked>;             // 192 x 128, 4, 3
using MaskedShort64 = Tiling<64, 2, Masks::kPacked>;        // 128 x 128, 4, 3
using Masked128 = Tiling<128, 2, Masks::kPacked>;           // 128 x 128, 2, 2
using Masked192x128 = Tiling<192, 2, Masks::kPacked, 128>;  // 128 x 128, 2, 1
using Masked256 = Tiling<256, 2, Masks::kPacked>;           // 128 x  64, 2, 1
// With a mask that is packed to weights, in bfloat16.
using Weighted64 = Tiling<64, 3, Masks::kWeights>;    // 192 x 128, 3, 3
using Weighted128 = Tiling<128, 2, Masks::kWeights>;  // 128 x 128, 2, 2
// The general kernel's, with room for masks.
using General64 = Tiling<64, 3, Masks::kGeneral>;    // 192 x 128, 2, 2
using General128 = Tiling<128, 2, Masks::kGeneral>;  // 128 x 128, 2, 1
using General256 = Tiling<256, 2, Masks::kGeneral>;  // 128 x  64, 2, 1

// A tiling for projections that still lack their biases: of kernels for it others pay nothing,
// where a branch that they pass by costs them up to a microsecond when code comes cold.
template <class C>
struct Biased : C {
  static constexpr bool kBiased = true;
};

// A tiling for ragged batches and pages, which have kernels of their own: dense ones pay nothing.
template <class C>
struct Gathered : C {
  static constexpr bool kGathered = true;
  static constexpr int kQueryArrivals = 32;  // of all lanes: each may have written to them
  static constexpr bool kSharesSlowEnd = true;
  // Without turns two groups may fall into step and want the tensor cores at the same times, for as
  // long as a tile lasts (docs: two rhythms).
  static constexpr bool kTurns = true;
  // After what is to be done: tiles that were drawn, their barriers, and where 32 boxes of K and of
  // V are.
  static constexpr int kItemBytes = 48;
  static constexpr int kDrawnAt = C::kItemsAt + C::kQueryStages * kItemBytes;
  static constexpr int kPlacesAt = kDrawnAt + (2 * 64 + 5 * 8 + 15) / 16 * 16;
  static constexpr int kSharedBytes = kPlacesAt + 2 * 32 * 4;
  static_assert(kSharedBytes <= C::kMostBytes);
};

}  // namespace flashonnx::sm90

// Tile shapes, one per bucket of head dimensions: the larger of D and Dv is rounded up to one, and
// what is missing of either is zeros in shared memory.
//
// A block of kWarps warps owns kQueries queries of one head and walks over keys in tiles of kKeys.
// Each warp owns 16 * kRowTiles queries with all keys and features of the tile, so softmax needs no
// other warp and P stays in registers. kRowTiles = 2 halves the shared-memory traffic per product
// (each fragment of K and V serves two), and is taken wherever the output fits in registers.
#pragma once

namespace flashonnx::sm80 {

// What a kernel is compiled for: each has what those before it have.
enum Instance {
  kPlain,     // no mask but bounds
  kKeyMask,   // a mask that does not depend on the query
  kGeneral,   // other masks and soft cap
  kGathered,  // ragged batches and pages
};

template <int kDim_, int kRowTiles_, int kWarps_, int kKeys_, int kBlocks_, int kQuerySteps_ = 0>
struct Tiling {
  static constexpr int kDim = kDim_;
  static constexpr int kRowTiles = kRowTiles_;
  static constexpr int kWarps = kWarps_;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kWarpQueries = 16 * kRowTiles;
  static constexpr int kQueries = kWarpQueries * kWarps;
  static constexpr int kKeys = kKeys_;
  static constexpr int kBlocks =
      kBlocks_;  // meant to be resident on a multiprocessor: sets the registers of a thread
  static constexpr int kQuerySteps = kQuerySteps_;  // times 16 features of Q stay in registers

  static constexpr int kKeyTiles =
      kKeys / 8;  // 8 columns of scores, or of the output: one accumulator
  static constexpr int kDimTiles = kDim / 8;
  static constexpr int kRun =
      kKeys / 4;  // neighbouring keys whose scores a thread has, in each of its rows

  // Shared memory: Q, K, V, then a bias for each key of two tiles where there is a mask. Runs of
  // biases are read at the same time by the threads that share a row: 4 more floats put them in
  // different banks. The first of these is a bound of the run's biases.
  static constexpr int kBiasRun = kRun + 4;
  static constexpr int kBiases = 4 * kBiasRun;
  static constexpr int kQueryBytes = kQueries * kDim * 2;
  static constexpr int kKeyBytes = kKeys * kDim * 2;
  static constexpr int kSharedBytes = kQueryBytes + 2 * kKeyBytes + 2 * kBiases * 4 + kRun * 4;

  // Of ragged batches and pages also: careful.cuh's flags, the slot of each key of two tiles (see
  // gather.cuh), and which queries the block has.
  static constexpr int kFlagBytes = 16;
  static constexpr int kSlotBytes = 2 * kKeys * 8;
  static constexpr int kPlace = kSharedBytes + kFlagBytes + kSlotBytes;
  static constexpr int kGatheredBytes = kPlace + 48;
};

// The same queries with the fewest keys at a time, for the walk of careful.cuh: it needs registers
// for other things.
template <class C>
using CarefulTiling = Tiling<C::kDim, C::kRowTiles, C::kWarps, 32, C::kBlocks>;

//                       dim  row tiles  warps  keys  blocks    queries  shared memory
using Tiling32 = Tiling<32, 2, 4, 64, 3>;       //  128      16.5 KB
using Tiling64 = Tiling<64, 2, 4, 128, 2>;      //  128      49 KB
using Tiling96 = Tiling<96, 2, 4, 64, 2>;       //  128      48.5 KB
using Tiling128 = Tiling<128, 2, 4, 64, 2>;     //  128      64.5 KB
using Tiling192 = Tiling<192, 1, 8, 64, 1, 4>;  //  128      96.5 KB
using Tiling256 = Tiling<256, 1, 4, 64, 2, 8>;  //   64      96.5 KB

// The least opt-in shared memory of any device of compute capability 8.0 and up (8.6, 8.9
// and 12.0).
static_assert(Tiling128::kGatheredBytes <= 99 * 1024 && Tiling192::kGatheredBytes <= 99 * 1024 &&
              Tiling256::kGatheredBytes <= 99 * 1024);

}  // namespace flashonnx::sm80

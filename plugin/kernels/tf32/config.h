// Tile shapes, one per bucket of head dimensions: the larger of D and Dv is rounded up to one, and
// what is missing of either is zeros in shared memory. The names are those of sm80's tilings, whose
// softmax and masks are used here.
#pragma once

namespace flashonnx::tf32 {

template <int kDim_, int kRowTiles_, int kWarps_, int kKeys_, int kBlocks_>
struct Tiling {
  static constexpr int kDim = kDim_;
  static constexpr int kRowTiles = kRowTiles_;  // times 16 queries of a warp
  static constexpr int kWarps = kWarps_;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kWarpQueries = 16 * kRowTiles;
  static constexpr int kQueries = kWarpQueries * kWarps;
  static constexpr int kKeys = kKeys_;
  static constexpr int kBlocks =
      kBlocks_;  // meant to be resident on a multiprocessor: sets the registers of a thread

  static constexpr int kKeyTiles =
      kKeys / 8;  // 8 columns of scores, or of the output: one accumulator
  static constexpr int kDimTiles = kDim / 8;
  static constexpr int kRun =
      kKeys / 4;  // neighbouring keys whose scores a thread has, in each of its rows

  // Shared memory: Q, K, V, then a bias for each key of two tiles where there is a mask.
  static constexpr int kBiasRun = kRun + 4;
  static constexpr int kBiases = 4 * kBiasRun;
  static constexpr int kQueryBytes = kQueries * kDim * 4;
  static constexpr int kKeyBytes = kKeys * kDim * 4;
  static constexpr int kSharedBytes = kQueryBytes + 2 * kKeyBytes + 2 * kBiases * 4;
};

//                      dim  row tiles  warps  keys  blocks    queries  shared memory
using Tiling64 = Tiling<64, 2, 4, 32, 2>;    //  128      48.5 KB
using Tiling128 = Tiling<128, 2, 4, 32, 2>;  //  128      96.5 KB

}  // namespace flashonnx::tf32

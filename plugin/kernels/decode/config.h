// Tile shapes, one per bucket of head dimensions: the larger of D and Dv is rounded up to one, and
// what is missing of either is zeros in shared memory.
//
// Scores are computed transposed: 16 keys are the rows of an mma's A operand, kRows queries the
// columns of its B operand. A query here is one of one query head: all those that share a key head
// are packed, so that K and V are read once for the whole group.
#pragma once

namespace flashonnx::decode {

constexpr int kTileKeys = 16;

template <int kDim_, int kRowTiles_, int kStages_>
struct Tiling {
  static constexpr int kDim = kDim_;
  static constexpr int kRowTiles = kRowTiles_;  // of 8 queries
  static constexpr int kRows = 8 * kRowTiles;
  static constexpr int kStages = kStages_;  // tiles of keys that a warp has on their way
  static constexpr int kKeys = kTileKeys;   // of a tile
  static constexpr int kSteps = kDim / 16;  // of Q K^T over features; tiles of V^T P^T's rows
  static constexpr int kMaxWarps = 8;

  // Shared memory: a ring of tiles for each warp, and the pages of as many tiles; Q; {maximum, sum}
  // of each row from each warp. In clusters also what other blocks send, 16-byte pieces of outputs
  // and such sums, and a barrier for it.
  static constexpr int kMaxCluster = 8;
  static constexpr int kTileBytes = kKeys * kDim * 2;
  static constexpr int kStageBytes = 2 * kTileBytes;  // K, V
  static constexpr int kPagesAt = kStages * kStageBytes;
  static constexpr int kPageBytes = kKeys * 4;  // of a tile
  static constexpr int kRingBytes = kPagesAt + (kStages * kPageBytes + 127) / 128 * 128;
  static constexpr int kQueryBytes = kRows * kDim * 2;
  static constexpr int kPieces = kDim / 4;  // of a row of outputs
  static constexpr int kReceivedBytes = (kRows * kPieces + kMaxCluster) * 16;
  static constexpr int kReceivedSumsBytes = kMaxCluster * kRows * 8;
  static constexpr int kSumsBytes = kMaxWarps * kRows * 8;
  static constexpr int kBarrierBytes = 16;
  static constexpr int kOwnBytes = kQueryBytes + kSumsBytes;
  static constexpr int kExtraBytes =
      kOwnBytes + kBarrierBytes + kReceivedBytes + kReceivedSumsBytes;
  // A warp's outputs take its ring's place, in rows whose distance spreads them over all banks.
  static constexpr int kOutputRow = kDim + 4;
  static_assert(kRows * kOutputRow * 4 <= kRingBytes);
};

// 24 KB on their way for each warp, 32 KB at 256.
//                          dim  row tiles  stages
using Tiling64 = Tiling<64, 1, 6>;
using Tiling64Wide = Tiling<64, 2, 6>;
using Tiling128 = Tiling<128, 1, 3>;
using Tiling128Wide = Tiling<128, 2, 3>;
using Tiling256 = Tiling<256, 1, 2>;

}  // namespace flashonnx::decode

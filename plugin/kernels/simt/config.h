// Tile shapes of the CUDA-core kernel, one per bucket of head dimensions.
//
// A block owns kBlockRows queries of one head and walks over keys in tiles of kBlockKeys. Its warps
// form a grid of kRowWarps x kColumnWarps: each row of warps owns 32 queries; its columns share the
// keys of Q K^T and the features of P V. A lane holds kThreadRows x kThreadKeys scores and 8 x 8
// outputs, so an inner step does 16 FFMA for each 16-byte load from shared memory where the keys
// are not shared (bucket 64), and in P V everywhere.
#pragma once

#include <cstdint>

#include "kernels/common/inline.h"

namespace flashonnx::simt {

template <int kBucket, int kRowWarps_, int kColumnWarps_, int kChunk_>
struct Tiling {
  static constexpr int kHeadDim = kBucket;  // the most features Q, K and V may have
  static constexpr int kRowWarps = kRowWarps_;
  static constexpr int kColumnWarps = kColumnWarps_;
  static constexpr int kThreads = 32 * kRowWarps * kColumnWarps;
  static constexpr int kLaneRows = 4;  // lanes of a warp down the queries ...
  static constexpr int kLaneColumns =
      8;  // ... and across keys or features: 8 x 16 bytes are all 32 banks
  static constexpr int kThreadRows = 8;     // queries of a lane: 32 of the warp / kLaneRows
  static constexpr int kThreadColumns = 8;  // output features of a lane, as two vectors of 4
  static constexpr int kBlockRows = 32 * kRowWarps;
  static constexpr int kBlockKeys =
      64;  // 16 vectors of 4 in a row of P: enough for its swizzle, small enough for 99 KB
  static constexpr int kThreadKeys = kBlockKeys / (kLaneColumns * kColumnWarps);
  static constexpr int kKeyVector =
      kThreadKeys < 4 ? kThreadKeys : 4;  // neighbouring keys of a lane
  static constexpr int kChunk = kChunk_;  // floats of K or V that are staged at a time, twice
  static constexpr int kKeyFeatures =
      kChunk / kBlockKeys;  // a chunk of K: all keys of the tile, some features
  static constexpr int kValueKeys = kChunk / kBucket;  // a chunk of V: some keys, all features
  static constexpr int kMinBlocks =
      kThreads == 128 ? 2 : 1;  // per multiprocessor: up to 255 registers a thread

  static_assert(kColumnWarps * kLaneColumns * kThreadColumns == kBucket,
                "the warps' columns cover the features");
  static_assert(kKeyFeatures >= 32 && kValueKeys >= 4,
                "swizzles need 8 vectors in a row of K, P V steps by 4 keys");

  // Floats of shared memory: Q (whole chunks of features), two chunks of K or V, P, row statistics
  // of each warp column.
  static FLASHONNX_HOST_DEVICE constexpr int query_chunks(int head_dim) {
    return (head_dim + kKeyFeatures - 1) / kKeyFeatures;
  }
  static FLASHONNX_HOST_DEVICE constexpr int query_floats(int head_dim) {
    return query_chunks(head_dim) * kBlockRows * kKeyFeatures;
  }
  static constexpr int64_t shared_bytes(int head_dim) {
    const int statistics = kColumnWarps > 1 ? kColumnWarps * kBlockRows : 0;
    return 4 * int64_t{query_floats(head_dim) + 2 * kChunk + kBlockRows * kBlockKeys + statistics};
  }
};

//                        bucket  warps   chunk     queries  threads  shared memory at D = bucket
using Tiling64 = Tiling<64, 4, 1, 4096>;    //  128      128     96 KB
using Tiling128 = Tiling<128, 2, 2, 4096>;  //   64      128     80.5 KB
using Tiling256 = Tiling<256, 1, 4, 4096>;  //   32      128     72.5 KB
using Tiling512 = Tiling<512, 1, 8, 2048>;  //   32      256     89 KB

// The least opt-in shared memory of any device of compute capability 8.0 and up (8.6, 8.9
// and 12.0).
static_assert(Tiling64::shared_bytes(64) <= 99 * 1024 && Tiling128::shared_bytes(128) <= 99 * 1024);
static_assert(Tiling256::shared_bytes(256) <= 99 * 1024 &&
              Tiling512::shared_bytes(512) <= 99 * 1024);

}  // namespace flashonnx::simt

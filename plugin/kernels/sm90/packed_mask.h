// What a mask is turned into by a small kernel before the attention kernel, for tiles of queries
// and keys: what consumers need of each tile in the order in which they use it, and marks that tell
// which tiles are hidden whole and which are not masked at all.
//
// - A mask without a row per query: biases of keys, as features of a product or as they are.
// - One with a row per query, of bytes, or of Q's type and nothing but 0 and -infinity: bits. What
//   one of Q's type holds is known to the device alone: the kernel for bits and the general one are
//   both launched then, and one of them finds that it is not meant.
#pragma once

#include <cuda_runtime_api.h>

#include "flashonnx/status.h"
#include "kernels/common/plan.h"
#include "kernels/table.h"

namespace flashonnx::sm90 {

struct PackedMask {
  // Of each tile, tiles of keys after one another. Bits: 8 bytes for each consumer thread; bit i is
  // its score i, 1 if the key is seen. Biases: `bias_bytes` of each key.
  unsigned char* tiles;
  uint8_t* marks;      // a byte of each tile
  float* top;          // the largest bias of each tile, in powers of 2
  int64_t tile_count;  // 0: nothing is packed
  int32_t row_tiles;   // tiles of queries that a mask has rows for; 1 if the rows are the same
  int32_t key_tiles;

  // The row of tiles for a tile of queries.
  FLASHONNX_HOST_DEVICE int row_of(const Problem& p, const Work& work, int queries) const {
    const int heads = p.mask.head != 0 ? static_cast<int>(p.q_heads) : 1;
    const int mask = (p.mask.batch != 0 ? work.batch : 0) * heads + (heads > 1 ? work.head : 0);
    return mask * row_tiles + (row_tiles > 1 ? work.first_query / queries : 0);
  }
};
// Of a tile: some keys are seen; some are hidden or biased; some biases of a mask with a row per
// query are finite; of one without, all are below -2^100, or some are above -2^15 (powers of 2), or
// the largest is between -8 and 8.
constexpr int kSeen = 1, kMasked = 2, kBiased = 4, kLeast = 8, kOrdinary = 16, kCalm = 64;
// Of one with weights, where each 16 queries of a tile have marks: some rows are level
// (coarse.cuh).
constexpr int kLevel = 32, kWeightMarks = 16;

// What the attention kernel for a mask wants: of a tile, and of a key's bias (4: as float32).
struct Packing {
  int queries, keys, bias_bytes;
};

// Whether a mask with a row per query is packed: it pays where heads share it, and not for small
// problems.
bool packs_rows(const Params& params);
// Whether such a mask may have to be added all the same.
inline bool may_be_biased(const Params& params) { return size_of(params.mask.dtype) != 1; }

// Of workspace, for this problem and at most for one of sizes up to these.
int64_t packed_mask_bytes(const Params& params);
int64_t packed_mask_bound(const Params& params);
flashonnx_status pack_mask(const Params& params, const Packing& packing, void* workspace,
                           cudaStream_t stream, PackedMask* packed);

}  // namespace flashonnx::sm90

// Biases as weights of P: 2^(score + bias) = 2^score 2^bias. P is made of the scores alone, as
// without a mask, and rounded, and then a packed pair of P takes one multiplication: half an
// instruction a score, where biases would take two. A hidden key's weight is 0. Weights are
// bfloat16, which has the range of float32, relative to the largest bias of their row
// (packed_weights.h).
//
// The maximum of a row is one of scores, also of those that have no weight. So a row whose sum
// comes out tiny has lost what counts, as its best key has a score far below those that its biases
// put behind: the warp computes it again (careful.cuh).
#pragma once

#include "kernels/sm90/general.cuh"

namespace flashonnx::sm90 {

// Of a row's sum: below it P may have lost bits, as it ends at 2^-126.
constexpr float kTinySum = 0x1p-60f;

// Whether P of a tile of keys has weights.
template <class C, Look kLook>
__device__ __forceinline__ bool has_weights(const ItemOf<C>& item, int tile) {
  if constexpr (C::kWeights && kLook != Look::kNone)
    return kLook == Look::kBiases || is_biased(item.marks, tile);
  return false;
}

// The weights that the copy engine brings a group, of one masked tile after the other.
template <class C>
class Weights {
 public:
  // p *= those of the warp's 16 rows, laid out in shared memory as the A operand: 512 bytes for 16
  // keys, 16 of each lane.
  __device__ __forceinline__ void multiply(const Shared<C>& shared, const Lane& lane,
                                           uint32_t (&p)[C::kScores / 2]) {
    wait(shared, lane);
    const uint32_t at =
        shared.weights(lane.group) + lane.warp * (C::kWeightBytes / 4) + lane.lane * 16;
    uint32_t loaded = 0;  // follows from a product of each load
#pragma unroll
    for (int i = 0; i < C::kScores / 2; i += 4) {
      uint32_t x[4];
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                   : "r"(at + i * 128));
#pragma unroll
      for (int j = 0; j < 4; ++j)
        asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(p[i + j]) : "r"(p[i + j]), "r"(x[j]));
      loaded |= p[i];
    }
    let_go(shared, lane, loaded);
  }
  // Of a tile of keys that the group leaves out.
  __device__ __forceinline__ void skip(const Shared<C>& shared, const Lane& lane) {
    wait(shared, lane);
    let_go(shared, lane, 0);
  }

 private:
  __device__ __forceinline__ void wait(const Shared<C>& shared, const Lane& lane) const {
    barrier_wait(shared.w_full(lane.group), round_);
  }
  __device__ __forceinline__ void let_go(const Shared<C>& shared, const Lane& lane,
                                         uint32_t loaded) {
    barrier_arrive_after(loaded, shared.w_free(lane.group));
    round_ ^= 1;
  }
  uint32_t round_ = 0;
};

// Of the rows of a tile of queries.
template <class C>
__device__ __forceinline__ const float* tops_of(const PackedMask& packed, const Item& item) {
  return packed.top + int64_t{item.marks.row.index} * C::kQueries;
}

// By a group, `queries` being its own in shared memory: those of level rows become zeros, so that
// their scores are equal.
template <class C>
__device__ __forceinline__ void level_queries(const PackedMask& packed, const Item& item,
                                              const Lane& lane, uint32_t queries) {
  if (!item.marks.row.level) return;
  constexpr int kChunks = C::kBoxRow / 16;
  const int chunk = threadIdx.x % kChunks;
#pragma unroll 1
  for (int row = threadIdx.x % 128 / kChunks; row < 64; row += 128 / kChunks) {
    if (!is_level(tops_of<C>(packed, item)[lane.group * 64 + row])) continue;
#pragma unroll
    for (int box = 0; box < C::kBoxes; ++box) {
      const uint32_t to = queries + (box * C::kQueries + row) * C::kBoxRow + chunk * 16;
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
    }
  }
  fence_async();
  named_sync(1 + C::kGroups + lane.group, 128);
}

// After the last key: what was taken off the biases goes back to the maxima. False if a row's sum
// is of too little.
template <class C>
__device__ __forceinline__ bool add_tops(const PackedMask& packed, const Item& item,
                                         const Lane& lane, const float (&output)[C::kOutputs],
                                         RowState& state) {
  bool enough = true;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float top = tops_of<C>(packed, item)[lane.first_row() + 8 * h];
    if (output[C::kValueDim / 2 + 2 * h] < kTinySum && top > -INFINITY) enough = false;
    state.maximum[h] += top;
  }
  return enough;
}

}  // namespace flashonnx::sm90

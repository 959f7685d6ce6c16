// Ragged batches and pages: which queries a block has, and tiles of K and V whose rows stand
// anywhere.
#pragma once

#include "kernels/common/gather.cuh"
#include "kernels/common/plan.h"
#include "kernels/sm80/load.cuh"

namespace flashonnx::sm80 {

struct alignas(16) Place {
  Work work;
  Sequence sequence;
};
static_assert(sizeof(Place) == 48);

// For the whole block: where its queries stand, in `place`. Returns whether it has any.
template <class C>
__device__ __forceinline__ bool take_place(const Problem& p, const Plan& plan, Place* place) {
  if (threadIdx.x < 32) {
    Work work = work_of<C>(plan, block_index());
    if (p.ragged.queries) {  // `work` counts tiles of all sequences
      const Tile tile = find_tile(p.ragged, work.first_query / C::kQueries, C::kQueries);
      work.batch = tile.sequence;
      work.first_query = tile.first_query;
    }
    if (threadIdx.x == 0) *place = {work, sequence_of(p, work.batch)};
  }
  __syncthreads();
  return place->work.first_query >= 0 && place->work.first_query < place->sequence.queries;
}

// As load_tile, of the rows in `slots`; what is nowhere becomes zeros.
template <class C, class T>
__device__ __forceinline__ void load_slots(uint32_t shared, const T* source, int64_t page,
                                           int64_t stride, const Slot* slots, int dim,
                                           bool vectors) {
  using L = KeyLayout<C>;
  constexpr int kStep = C::kThreads / L::kGroup;
  const int first_row = threadIdx.x / L::kGroup, first_chunk = threadIdx.x % L::kGroup;
  const uint32_t to = shared + L::offset(first_row, first_chunk);
  const T* const chunk = source + first_chunk * 8;
  if (vectors && dim == C::kDim) {
#pragma unroll
    for (int r = 0; r < C::kKeys; r += kStep) {
      const Slot slot = slots[first_row + r];
      const int bytes = slot.page >= 0 ? 16 : 0;
      const T* from = slot.page >= 0 ? chunk + slot.page * page + slot.slot * stride : chunk;
#pragma unroll
      for (int c = 0; c < L::kChunks; c += L::kGroup)
        copy_async((to ^ L::swizzle(r) * 16) + (r * L::kChunks + c) * 16, from + c * 8, bytes);
    }
    return;
  }
#pragma unroll 1
  for (int r = 0; r < C::kKeys; r += kStep) {
    const Slot slot = slots[first_row + r];
    const T* from = chunk + slot.page * page + slot.slot * stride;
#pragma unroll
    for (int c = 0; c < L::kChunks; c += L::kGroup) {
      const uint32_t target = shared + L::offset(first_row + r, first_chunk + c);
      const int valid = slot.page >= 0 ? max(min(dim - (first_chunk + c) * 8, 8), 0) : 0;
      if (vectors && valid % 8 == 0) {
        copy_async(target, valid > 0 ? from + c * 8 : source, valid * 2);
      } else {
        store_shared(target, load_elements(from + c * 8, valid));
      }
    }
  }
}

}  // namespace flashonnx::sm80

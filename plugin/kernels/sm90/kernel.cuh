// The kernel: one block a multiprocessor, its warpgroups in their roles.
#pragma once

#include "kernels/common/overlap.cuh"
#include "kernels/sm90/consumer.cuh"

namespace flashonnx::sm90 {

// Of two kernels that may be meant, whether this one is: see packed_mask.h.
template <class C>
__device__ __forceinline__ bool is_meant(const PackedMask& packed) {
  bool biased = false;
  for (int64_t tile = threadIdx.x; tile < packed.tile_count; tile += C::kThreads)
    biased |= (packed.marks[tile] & kBiased) != 0;
  return (__syncthreads_or(biased) != 0) == C::kGeneral;
}

template <class T, class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    attention(const __grid_constant__ Problem p, const __grid_constant__ Plan plan,
              const __grid_constant__ Schedule schedule, const __grid_constant__ Maps maps,
              const __grid_constant__ PackedMask packed) {
  extern __shared__ unsigned char memory[];
  const Shared<C> shared(memory);
  const bool marked = C::kPackedMasks || C::kWeights || (C::kGeneral && plan.mask_per_key);
  if (threadIdx.x == 0) shared.init_barriers(marked);
  if constexpr (C::kBiased)
    if (threadIdx.x == 0) shared.init_landed_barriers();
  if constexpr (C::kSumsByProducts) shared.fill_ones(pack<T>(1.f, 1.f));
  if constexpr (C::kBiasProduct) shared.fill_bias_operands(!plan.mask_per_key);
  if constexpr (C::kMarks) {
    // The kernel that packs its mask.
    if (packed.tile_count > 0) wait_for_predecessor();
    if (packed.tile_count > 0 && !plan.mask_per_key && !C::kWeights && !is_meant<C>(packed)) return;
  }
  // The first warp needs nothing that others have set up.
  if (threadIdx.x < 32) {
    named_arrive(0, C::kThreads);
  } else {
    named_sync(0, C::kThreads);
  }
  if (threadIdx.x >= 128) {
    take_registers<C::kConsumerRegisters>();
    Consumer<T, C>(p, plan, maps.o, shared, &packed).run();
  } else {
    give_registers<C::kProducerRegisters>();
    if (threadIdx.x == 0 && !marked) {
      if constexpr (!C::kPackedMasks && !C::kWeights)
        produce<C, false>(p, plan, schedule, maps, packed, shared);
    } else if (threadIdx.x == 0) {
      if constexpr (C::kMarks) produce<C, true>(p, plan, schedule, maps, packed, shared);
    } else if (C::kWeights && threadIdx.x == 32) {
      if constexpr (C::kWeights) produce_weights<C>(packed, shared);
    } else if (marked && threadIdx.x / 32 == 2) {
      if constexpr (C::kMarks) find_tiles<C>(p, plan, schedule, packed, shared);
    }
    if constexpr (C::kBiased)
      if (threadIdx.x / 32 == 1 || threadIdx.x / 32 == 2) add_query_biases<T, C>(p, shared);
  }
  if (threadIdx.x / 32 == 3) store_empty_tiles<T, C>(p, schedule);
}

}  // namespace flashonnx::sm90

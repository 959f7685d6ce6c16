// The kernel: one block a multiprocessor, its warpgroups in their roles.
#pragma once

#include "kernels/sm90/consumer.cuh"

namespace flashonnx::sm90 {

template <class T, class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    attention(const __grid_constant__ Problem p, const __grid_constant__ Plan plan,
              const __grid_constant__ Schedule schedule, const __grid_constant__ Maps maps) {
  extern __shared__ unsigned char memory[];
  const Shared<C> shared(memory);
  if (threadIdx.x == 0) shared.init_barriers(plan.mask_per_key);
  if constexpr (C::kOnes) shared.fill_ones(pack<T>(1.f, 1.f));
  __syncthreads();
  if (threadIdx.x < 128) {
    give_registers<C::kProducerRegisters>();
    if (threadIdx.x == 0) {
      produce<C>(p, plan, schedule, maps, shared);
    } else if (threadIdx.x / 32 == 1 && plan.mask_per_key) {
      produce_biases<C>(p, plan, schedule, shared);
    } else if (threadIdx.x / 32 == 2) {
      store_empty_tiles<T, C>(p, schedule);
    }
  } else {
    take_registers<C::kConsumerRegisters>();
    Consumer<T, C>(p, plan, maps.o, shared).run();
  }
}

}  // namespace flashonnx::sm90

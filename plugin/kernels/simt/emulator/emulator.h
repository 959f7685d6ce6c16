// CUDA C++ on the CPU, as far as the kernels of this folder use it: blocks one after the other, the
// threads of a block as fibers that change places at barriers and shuffles. The order in which they
// run is drawn anew each round, shared memory starts as NaN and asynchronous copies arrive only
// when waited for, so that a missing barrier, a missing wait and a value that was never written
// show as wrong results; sanitizers see every access outside a buffer.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <ucontext.h>
#include <vector_functions.h>

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <type_traits>
#include <vector>

#undef __device__
#undef __forceinline__
#undef __global__
#undef __grid_constant__
#undef __launch_bounds__
#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)

using std::max;
using std::min;

namespace emulator {

struct Index {
  unsigned x, y;
};

struct Barrier {
  int expected = 0, arrived = 0;
  unsigned generation = 0;
  bool vote = false, result = false;
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool done;
  std::vector<std::function<void()>> copies;  // on their way
};

struct Machine {
  std::vector<Fiber> fibers;
  ucontext_t scheduler;
  int current = 0;  // the running thread
  Index block, grid;
  Barrier block_barrier;
  std::vector<Barrier> warp_barriers;
  std::vector<double> exchange;  // shuffles, of floats and 32-bit integers
  std::unique_ptr<float4[]> shared;
  std::function<void()> kernel;
  std::mt19937 random{0};
};

inline Machine machine;

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "emulator: %s\n", what);
  std::abort();
}

inline void yield() { swapcontext(&machine.fibers[machine.current].context, &machine.scheduler); }

inline bool wait(Barrier& barrier, bool vote) {
  barrier.vote |= vote;
  if (++barrier.arrived == barrier.expected) {
    barrier.result = barrier.vote;
    barrier.vote = false;
    barrier.arrived = 0;
    ++barrier.generation;
  } else {
    for (const unsigned generation = barrier.generation; barrier.generation == generation;) yield();
  }
  return barrier.result;
}

inline void run_thread() {
  machine.kernel();
  machine.fibers[machine.current].done = true;
  yield();
}

inline void run_block(int threads) {
  constexpr size_t kStack = 256 << 10;
  machine.fibers.resize(std::max<size_t>(machine.fibers.size(), threads));
  machine.exchange.assign(threads, 0.);
  machine.block_barrier = {threads};
  machine.warp_barriers.assign(threads / 32, Barrier{32});
  std::vector<int> order;
  for (int thread = 0; thread < threads; ++thread) {
    Fiber& fiber = machine.fibers[thread];
    if (!fiber.stack) fiber.stack = std::make_unique<char[]>(kStack);
    fiber.done = false;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStack;
    makecontext(&fiber.context, run_thread, 0);
    order.push_back(thread);
  }
  while (!order.empty()) {
    std::shuffle(order.begin(), order.end(), machine.random);
    for (int thread : order) {
      machine.current = thread;
      swapcontext(&machine.scheduler, &machine.fibers[thread].context);
    }
    order.erase(std::remove_if(order.begin(), order.end(),
                               [](int thread) { return machine.fibers[thread].done; }),
                order.end());
  }
  if (machine.block_barrier.arrived != 0) fail("a barrier that some threads never reached");
  for (const Fiber& fiber : machine.fibers) {
    if (!fiber.copies.empty()) fail("copies that nobody waited for");
  }
}

inline float* shared_memory() { return reinterpret_cast<float*>(machine.shared.get()); }

inline void copy_async(float* shared, const void* global, int size, int bytes) {
  const auto aligned = [&](const void* p) { return reinterpret_cast<uintptr_t>(p) % size == 0; };
  if (!aligned(shared) || !aligned(global)) fail("a copy that is not aligned");
  if (bytes < 0 || bytes > size) fail("a copy of an impossible size");
  for (int i = 0; i < size / 4; ++i) shared[i] = NAN;
  machine.fibers[machine.current].copies.push_back([=] {
    std::memcpy(shared, global, bytes);
    std::memset(reinterpret_cast<char*>(shared) + bytes, 0, size - bytes);
  });
}

inline void copy_wait() {
  std::vector<std::function<void()>>& copies = machine.fibers[machine.current].copies;
  for (const auto& copy : copies) copy();
  copies.clear();
}

template <class T>
T shuffle(T x, int source) {
  Barrier& barrier = machine.warp_barriers[machine.current / 32];
  machine.exchange[machine.current] = static_cast<double>(x);
  wait(barrier, false);
  const T y = static_cast<T>(machine.exchange[source]);
  wait(barrier, false);
  return y;
}

struct ThreadIndex {
  struct {
    operator int() const { return machine.current; }
  } x;
};

}  // namespace emulator

inline const emulator::ThreadIndex threadIdx;
inline emulator::Index& blockIdx = emulator::machine.block;
inline emulator::Index& gridDim = emulator::machine.grid;

inline void __syncthreads() { emulator::wait(emulator::machine.block_barrier, false); }
inline int __syncthreads_or(int vote) {
  return emulator::wait(emulator::machine.block_barrier, vote != 0);
}
inline float __shfl_xor_sync(unsigned, float x, int distance) {
  return emulator::shuffle(x, emulator::machine.current ^ distance);
}
inline unsigned __ballot_sync(unsigned, bool vote) {
  const int first = emulator::machine.current / 32 * 32;
  emulator::Barrier& barrier = emulator::machine.warp_barriers[first / 32];
  emulator::machine.exchange[emulator::machine.current] = vote;
  emulator::wait(barrier, false);
  unsigned votes = 0;
  for (int lane = 0; lane < 32; ++lane)
    votes |= static_cast<unsigned>(emulator::machine.exchange[first + lane] != 0) << lane;
  emulator::wait(barrier, false);
  return votes;
}
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1; }
template <class T>
T __shfl_sync(unsigned, T x, int lane) {
  return emulator::shuffle(x, emulator::machine.current / 32 * 32 + lane);
}
template <class T>
T __shfl_up_sync(unsigned, T x, int distance) {
  const int lane = emulator::machine.current;
  return emulator::shuffle(x, lane % 32 >= distance ? lane - distance : lane);
}
inline bool __any_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) != 0; }
inline bool __all_sync(unsigned mask, bool vote) { return __ballot_sync(mask, !vote) == 0; }
inline int __reduce_max_sync(unsigned mask, int x) {
  for (int distance = 16; distance > 0; distance /= 2)
    x = max(x, emulator::shuffle(x, emulator::machine.current ^ distance));
  (void)mask;
  return x;
}

template <class... T>
cudaError_t cudaFuncSetAttribute(void (*)(T...), cudaFuncAttribute, int) {
  return cudaSuccess;
}

template <class T>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(T),
                               const T& argument) {
  emulator::Machine& machine = emulator::machine;
  machine.grid = {config->gridDim.x, config->gridDim.y};
  const size_t vectors = config->dynamicSmemBytes / sizeof(float4);
  machine.shared = std::make_unique<float4[]>(vectors);
  machine.kernel = [&] { kernel(argument); };
  for (unsigned y = 0; y < machine.grid.y; ++y) {
    for (unsigned x = 0; x < machine.grid.x; ++x) {
      machine.block = {x, y};
      std::fill_n(machine.shared.get(), vectors, float4{NAN, NAN, NAN, NAN});
      emulator::run_block(config->blockDim.x);
    }
  }
  return cudaSuccess;
}

// The asynchronous machinery of Hopper, one function an instruction: barriers in shared memory, the
// copy engine, named barriers between warps, and the split of the register file.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/common/shared_memory.cuh"

namespace flashonnx::sm90 {

// A barrier in shared memory, by its address. It has a phase, 0 at first, that ends when `arrivals`
// have arrived and all bytes that were announced have landed.
__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// As well, but not before `x` is there, so that what it was made of has been loaded: the assembler
// lets an arrival pass loads whose values are used after it. Either arrival is the same.
__device__ __forceinline__ void barrier_arrive_after(uint32_t x, uint32_t barrier) {
  asm volatile(
      "{\n"
      ".reg .pred negative;\n"
      "setp.lt.s32 negative, %1, 0;\n"
      "@negative mbarrier.arrive.shared::cta.b64 _, [%0];\n"
      "@!negative mbarrier.arrive.shared::cta.b64 _, [%0];\n"
      "}\n" ::"r"(barrier),
      "r"(x)
      : "memory");
}

__device__ __forceinline__ void barrier_arrive_expecting(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// As well, without arriving.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Whether the phase of this parity is over.
__device__ __forceinline__ bool barrier_passed(uint32_t barrier, uint32_t parity) {
  uint32_t passed;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}\n"
      : "=r"(passed)
      : "r"(barrier), "r"(parity)
      : "memory");
  return passed != 0;
}

// Waits for the end of the phase of this parity.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over;\n"
      "bra again;\n"
      "over:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// As well where it may take long: a look takes issue slots.
__device__ __forceinline__ void barrier_wait_long(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, %2;\n"
      "@done bra over;\n"
      "bra again;\n"
      "over:\n"
      "}\n" ::"r"(barrier),
      "r"(parity), "r"(10000000)
      : "memory");
}

// Barriers are initialised with ordinary stores; the copy engine is to see them.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Ordinary stores to shared memory before it are seen by tensor cores and copy engine after it.
__device__ __forceinline__ void fence_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// True, by the only thread of a warp that runs this.
__device__ __forceinline__ bool is_elected_alone() {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred one;\n"
      "elect.sync _|one, 1;\n"
      "selp.u32 %0, 1, 0, one;\n"
      "}\n"
      : "=r"(elected));
  return elected != 0;
}

__device__ __forceinline__ void prefetch(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void prefetch_line(const void* data) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(data));
}

// Copies the box at these coordinates of a tensor (feature, row, head, batch). Elements outside the
// tensor become zeros.
__device__ __forceinline__ void copy_box(uint32_t shared, const CUtensorMap* map, uint32_t barrier,
                                         int feature, int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(feature), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

// Copies rows of all features of a tensor whose rows are numbered by groups of 8: groups of the
// box, and in each of them boxes of features side by side.
__device__ __forceinline__ void copy_whole_rows(uint32_t shared, const CUtensorMap* map,
                                                uint32_t barrier, int group, int head) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %3, %3, %4, %5}], [%2];" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(0), "r"(group), "r"(head)
      : "memory");
}

// Copies bytes as they are, a multiple of 16.
__device__ __forceinline__ void copy_bytes(uint32_t shared, const void* from, uint32_t bytes,
                                           uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// Copies a box from shared memory to these coordinates of a tensor; what lies outside is left out.
__device__ __forceinline__ void store_box(const CUtensorMap* map, uint32_t shared, int feature,
                                          int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::
          "l"(map),
      "r"(shared), "r"(feature), "r"(row), "r"(head), "r"(batch)
      : "memory");
}
__device__ __forceinline__ void commit_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until the thread's stores have read their boxes.
__device__ __forceinline__ void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Four 8 x 8 matrices of 16-bit elements, laid out as accumulators are, to shared memory; lane l
// gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrices(uint32_t shared, const uint32_t (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared),
               "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

// Named barriers: 0 is __syncthreads.
__device__ __forceinline__ void named_sync(int name, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int name, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
// Whether it is so for all threads, which wait for each other.
__device__ __forceinline__ bool named_all(int name, int threads, bool x) {
  uint32_t all;
  asm volatile(
      "{\n"
      ".reg .pred mine, ours;\n"
      "setp.ne.u32 mine, %3, 0;\n"
      "bar.red.and.pred ours, %1, %2, mine;\n"
      "selp.u32 %0, 1, 0, ours;\n"
      "}\n"
      : "=r"(all)
      : "r"(name), "r"(threads), "r"(static_cast<uint32_t>(x))
      : "memory");
  return all != 0;
}

__device__ __forceinline__ void pause() { asm volatile("nanosleep.u32 0;" ::: "memory"); }

// Ends the thread where it stands: a return is a jump to the end of the kernel's code.
__device__ __forceinline__ void exit_if(bool condition) {
  asm volatile(
      "{\n"
      ".reg .pred over;\n"
      "setp.ne.u32 over, %0, 0;\n"
      "@over exit;\n"
      "}\n" ::"r"(static_cast<uint32_t>(condition)));
}

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace flashonnx::sm90

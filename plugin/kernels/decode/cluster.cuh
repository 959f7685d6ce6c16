// Blocks of a cluster (compute capability 9.0) write into each other's shared memory. Elsewhere a
// cluster has one block, and none of this is called.
#pragma once

#include <cstdint>

namespace flashonnx::decode {

// Every thread of every block of the cluster: first says that it came, then waits for all others.
// Says nothing of memory but barriers that expect_bytes made.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Makes a barrier in shared memory that is passed once `bytes` have come by store_remote. One
// thread calls this, before cluster_arrive.
__device__ __forceinline__ void expect_bytes(uint32_t barrier, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
#endif
}

__device__ __forceinline__ void wait_for_bytes(uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier)
      : "memory");
#endif
}

// The address at which block `rank` of the cluster has what stands at `shared` here.
__device__ __forceinline__ uint32_t remote_address(uint32_t shared, uint32_t rank) {
  uint32_t remote = shared;
#if __CUDA_ARCH__ >= 900
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared), "r"(rank));
#endif
  return remote;
}

// Both addresses are remote ones, of the same block.
__device__ __forceinline__ void store_remote(uint32_t to, float4 x, uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(to),
      "r"(__float_as_uint(x.x)), "r"(__float_as_uint(x.y)), "r"(__float_as_uint(x.z)),
      "r"(__float_as_uint(x.w)), "r"(barrier)
      : "memory");
#endif
}

__device__ __forceinline__ void store_remote(uint32_t to, float2 x, uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(
          to),
      "r"(__float_as_uint(x.x)), "r"(__float_as_uint(x.y)), "r"(barrier)
      : "memory");
#endif
}

}  // namespace flashonnx::decode

// Products of a warpgroup: 64 rows, operands described by where they stand in shared memory, or A
// in registers. The instructions themselves are CuTe's.
#pragma once

#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED  // columns that are no power of 2, as 72
#include <cute/arch/mma_sm90_gmma.hpp>
#include <utility>

#include "kernels/common/arithmetic.cuh"
#include "kernels/sm90/async.cuh"
#include "kernels/sm90/config.h"

namespace flashonnx::sm90 {

namespace gmma = cute::SM90::GMMA;

// Descriptors of tiles as the copy engine leaves them: boxes of C::kBox features side by side, each
// with swizzled rows of C::kBoxRow bytes ("matrix-descriptor" in the PTX manual: addresses and
// offsets count 16 bytes). The upper half is a constant; an offset of the tile adds to the lower.
struct Descriptor {
  uint32_t lower, upper;

  // Tells the compiler that all lanes have the same one: sums with offsets are then made where
  // products take them from, in uniform registers. That takes a while, so well before.
  __device__ __forceinline__ Descriptor uniform() const {
    return {__shfl_sync(0xffffffffu, lower, 0), upper};
  }
  __device__ __forceinline__ uint64_t plus(uint32_t bytes) const {
    return uint64_t{upper} << 32 | (lower + bytes / 16);
  }
  __device__ __forceinline__ uint64_t plus_chunks(uint32_t chunks) const {  // of 16 bytes
    return uint64_t{upper} << 32 | (lower + chunks);
  }
  // As well; what follows the box stays where it is.
  __device__ __forceinline__ uint64_t plus_before_ones(uint32_t bytes) const {
    return uint64_t{upper} << 32 | (lower + bytes / 16 - (bytes / 16 << 16));
  }
};

template <class C>
constexpr uint32_t kSwizzled = (C::kBoxRow == 128 ? 1u : 2u) << 30;

// Rows are the operand's rows (queries of A, keys of B), 8 of them `apart` chunks of 16 bytes from
// the next, features what is summed over: 16 of them in one product.
template <class C>
__device__ __forceinline__ Descriptor described_by_rows(uint32_t shared, uint32_t apart) {
  return {(shared & 0x3ffff) >> 4 | 1u << 16, kSwizzled<C> | apart};
}
// As well without swizzling: rows of 16 bytes, of which each is both halves of a product's
// features; `groups` bytes from 8 rows to the next.
__device__ __forceinline__ Descriptor described_by_halves(uint32_t shared, uint32_t groups) {
  return {(shared & 0x3ffff) >> 4, groups / 16};
}
// Of 8 columns, where they are not beside V's: the same 8 rows of ones over and over.
template <class C>
__device__ __forceinline__ Descriptor described_ones(uint32_t base) {
  if (!C::kOnesApart) return {};
  return described_by_halves(base + C::kOnesAt, 0).uniform();
}
// Keys are what is summed over, 16 in one product; features are the columns of B: boxes follow one
// another, or after the only one comes a column of ones, which is the same for all keys.
template <class C>
__device__ __forceinline__ Descriptor described_by_features(uint32_t shared, uint32_t ones,
                                                            const Layout& layout) {
  const uint32_t next = C::kOnes ? (ones - shared) / 16 : layout.box;
  return {(shared & 0x3ffff) >> 4 | next << 16, kSwizzled<C> | layout.rows};
}

// The instruction of 64 x kColumns x 16 for an element type. SS: A and B in shared memory, columns
// of B in rows. RS: A in registers, columns of B in rows (K) or in features (MN).
template <class T, int kColumns>
__device__ __forceinline__ constexpr auto shared_product() {
  constexpr auto K = gmma::Major::K;
  if constexpr (std::is_same_v<T, __half>) {
    if constexpr (kColumns == 64) return gmma::MMA_64x64x16_F32F16F16_SS<K, K>{};
    if constexpr (kColumns == 192) return gmma::MMA_64x192x16_F32F16F16_SS<K, K>{};
    if constexpr (kColumns == 96) return gmma::MMA_64x96x16_F32F16F16_SS<K, K>{};
    if constexpr (kColumns == 128) return gmma::MMA_64x128x16_F32F16F16_SS<K, K>{};
  } else {
    if constexpr (kColumns == 64) return gmma::MMA_64x64x16_F32BF16BF16_SS<K, K>{};
    if constexpr (kColumns == 192) return gmma::MMA_64x192x16_F32BF16BF16_SS<K, K>{};
    if constexpr (kColumns == 96) return gmma::MMA_64x96x16_F32BF16BF16_SS<K, K>{};
    if constexpr (kColumns == 128) return gmma::MMA_64x128x16_F32BF16BF16_SS<K, K>{};
  }
}
template <class T, int kColumns, gmma::Major M>
__device__ __forceinline__ constexpr auto register_product() {
  constexpr auto K = gmma::Major::K;
  if constexpr (std::is_same_v<T, __half>) {
    if constexpr (kColumns == 8) return gmma::MMA_64x8x16_F32F16F16_RS<K, M>{};
    if constexpr (kColumns == 64) return gmma::MMA_64x64x16_F32F16F16_RS<K, M>{};
    if constexpr (kColumns == 72) return gmma::MMA_64x72x16_F32F16F16_RS<K, M>{};
    if constexpr (kColumns == 96) return gmma::MMA_64x96x16_F32F16F16_RS<K, M>{};
    if constexpr (kColumns == 128) return gmma::MMA_64x128x16_F32F16F16_RS<K, M>{};
    if constexpr (kColumns == 192) return gmma::MMA_64x192x16_F32F16F16_RS<K, M>{};
    if constexpr (kColumns == 256) return gmma::MMA_64x256x16_F32F16F16_RS<K, M>{};
  } else {
    if constexpr (kColumns == 8) return gmma::MMA_64x8x16_F32BF16BF16_RS<K, M>{};
    if constexpr (kColumns == 64) return gmma::MMA_64x64x16_F32BF16BF16_RS<K, M>{};
    if constexpr (kColumns == 72) return gmma::MMA_64x72x16_F32BF16BF16_RS<K, M>{};
    if constexpr (kColumns == 96) return gmma::MMA_64x96x16_F32BF16BF16_RS<K, M>{};
    if constexpr (kColumns == 128) return gmma::MMA_64x128x16_F32BF16BF16_RS<K, M>{};
    if constexpr (kColumns == 192) return gmma::MMA_64x192x16_F32BF16BF16_RS<K, M>{};
    if constexpr (kColumns == 256) return gmma::MMA_64x256x16_F32BF16BF16_RS<K, M>{};
  }
}

// Registers of an accumulator belong to products under way from `begin_products` to
// `wait_products`; the fences keep the compiler from moving accesses across.
template <int kCount>
__device__ __forceinline__ void fence_registers(float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(x[i])::"memory");
}
__device__ __forceinline__ void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until at most kPending committed groups are under way.
template <int kPending>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

struct BiasOperands {
  Descriptor factors, biases;
};

// scores = Q K^T of the warpgroup's 64 queries and the tile's keys: one group, under way
// afterwards. Biases come last: what is added after a large one is rounded as it is. Queries stand
// in shared memory or, which spares reading them from there for each tile, are held in registers.
template <class T, class C, bool kBiased, class Queries>
__device__ __forceinline__ void multiply_keys(const Queries& q, const Descriptor& k,
                                              const Layout& layout, const BiasOperands& biases,
                                              float (&scores)[C::kScores]) {
  const auto product = [&]<int... i>(int d, uint64_t b, gmma::ScaleOut out,
                                     std::integer_sequence<int, i...>) {
    if constexpr (C::kHoldsQueries) {
      using Product = decltype(register_product<T, C::kKeys, gmma::Major::K>());
      const uint32_t (&a)[4] = q[d / 16];
      Product::fma(a[0], a[1], a[2], a[3], b, scores[i]..., out);
    } else {
      const uint32_t box = d / C::kBox, inside = d % C::kBox * 2;
      decltype(shared_product<T, C::kKeys>())::fma(q.plus(box * C::kQueries * C::kBoxRow + inside),
                                                   b, scores[i]..., out);
    }
  };
  fence_registers(scores);
  begin_products();
#pragma unroll
  for (int d = 0; d < C::kDim; d += 16) {
    const uint32_t box = d / C::kBox, inside = d % C::kBox * 2;
    product(d, k.plus_chunks(box * layout.box + inside / 16),
            d == 0 ? gmma::ScaleOut::Zero : gmma::ScaleOut::One,
            std::make_integer_sequence<int, C::kScores>());
  }
  if constexpr (kBiased) {
    // Of this type whatever Q's is: it has the range of float32.
    [&]<int... i>(std::integer_sequence<int, i...>) {
      decltype(shared_product<__nv_bfloat16, C::kKeys>())::fma(
          biases.factors.plus(0), biases.biases.plus(0), scores[i]..., gmma::ScaleOut::One);
    }(std::make_integer_sequence<int, C::kScores>());
  }
  commit_products();
  fence_registers(scores);
}

// output += P V: one group, under way afterwards. `ones`: for sums apart, 8 columns.
template <class T, class C>
__device__ __forceinline__ void multiply_values(const uint32_t (&p)[C::kScores / 2],
                                                const Descriptor& v, const Layout& layout,
                                                const Descriptor& ones,
                                                float (&output)[C::kOutputs]) {
  constexpr int kColumns = C::kValueDim + (C::kOnes ? 8 : 0);
  const auto product = [&]<int... i>(const uint32_t* a, uint64_t b, gmma::ScaleOut out,
                                     std::integer_sequence<int, i...>) {
    decltype(register_product<T, kColumns, gmma::Major::MN>())::fma(a[0], a[1], a[2], a[3], b,
                                                                    output[i]..., out);
  };
  fence_registers(output);
  begin_products();
#pragma unroll
  for (int key = 0; key < C::kKeys; key += 16) {
    const uint32_t offset = key / 8 * layout.rows;
    product(p + key / 4, C::kOnes ? v.plus_before_ones(offset * 16) : v.plus_chunks(offset),
            gmma::ScaleOut::One, std::make_integer_sequence<int, kColumns / 2>());
    if constexpr (C::kOnesApart) {
      float* const sum = output + kColumns / 2;
      decltype(register_product<T, 8, gmma::Major::K>())::fma(
          p[key / 4], p[key / 4 + 1], p[key / 4 + 2], p[key / 4 + 3], ones.plus(0), sum[0], sum[1],
          sum[2], sum[3], gmma::ScaleOut::One);
    }
  }
  commit_products();
  fence_registers(output);
}

template <int n>
__device__ __forceinline__ void clear(float (&x)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) x[i] = 0.f;
}

// Copies a warp's 16 rows of Q to registers, laid out as the A operand.
template <class C>
__device__ __forceinline__ void hold_queries(uint32_t rows, int lane,
                                             uint32_t (&held)[C::kDim / 16][4]) {
  static_assert(C::kBoxRow == 128);
  const int row = lane % 16, half = lane / 16;  // of what this lane addresses
  const uint32_t at = rows + row * C::kBoxRow;
#pragma unroll
  for (int d = 0; d < C::kDim; d += 16) {
    const uint32_t box = at + d / C::kBox * C::kQueries * C::kBoxRow;
    load_matrices(held[d / 16], box + ((d % C::kBox / 8 + half) ^ row % 8) * 16);
  }
}

}  // namespace flashonnx::sm90

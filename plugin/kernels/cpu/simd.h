// Vectors of kWidth floats on GCC's and Clang's vector extensions, and the few functions that they
// lack.
#pragma once

#include <cfloat>
#include <cstdint>
#include <utility>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#define FLASHONNX_INLINE inline __attribute__((always_inline))

namespace flashonnx::cpu::FLASHONNX_CPU_ISA {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

typedef float Vec __attribute__((vector_size(4 * kWidth)));
typedef int32_t IntVec __attribute__((vector_size(4 * kWidth)));
typedef uint16_t ShortVec __attribute__((vector_size(2 * kWidth)));

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

constexpr float kInfinity = __builtin_inff();

FLASHONNX_INLINE Vec broadcast(float x) { return x - Vec{}; }

FLASHONNX_INLINE Vec load(const float* p) {
  Vec x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}

FLASHONNX_INLINE void store(float* p, Vec x) { __builtin_memcpy(p, &x, sizeof x); }

FLASHONNX_INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }  // b where one is NaN

// Asks for `bytes` > 0 bytes at p. Forced inline like all that call it: GCC deletes calls of a
// function that only prefetches.
FLASHONNX_INLINE void prefetch(const void* p, int64_t bytes) {
  const char* first = static_cast<const char*>(p);
  for (int64_t i = 0; i < bytes - 1; i += 64) __builtin_prefetch(first + i);
  __builtin_prefetch(first + bytes - 1);
}

// Rows are often far apart, where hardware does not foresee the next.
template <typename T>
FLASHONNX_INLINE void prefetch_rows(const T* p, int64_t stride, int64_t rows, int64_t dim) {
  for (int64_t n = 0; n < rows; ++n)
    prefetch(p + n * stride, dim * static_cast<int64_t>(sizeof(T)));
}

// Watches for Inf and NaN. The largest magnitude is a chain of latency 1, where 0 * x summed up
// would be one of 4.
struct FiniteCheck {
  IntVec largest{};

  FLASHONNX_INLINE void add(Vec x) {
    const IntVec magnitude = (IntVec)x & INT32_MAX;
    largest = magnitude > largest ? magnitude : largest;
  }
  FLASHONNX_INLINE bool finite() const {
    bool result = true;
    for (int i = 0; i < kWidth; ++i) result &= largest[i] < 0x7f800000;
    return result;
  }
};

// -- 16-bit floats

FLASHONNX_INLINE Vec widen(ShortVec bits, BFloat16) {
  return (Vec)(__builtin_convertvector(bits, IntVec) << 16);
}

FLASHONNX_INLINE ShortVec narrow(Vec x, BFloat16) {
  const IntVec bits = (IntVec)x;
  const IntVec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest even
  const IntVec quiet = (bits >> 16) | 0x40;
  return __builtin_convertvector(x == x ? rounded : quiet, ShortVec);
}

#if defined(__AVX512F__)
FLASHONNX_INLINE Vec widen(ShortVec bits, Half) {
  return (Vec)_mm512_maskz_cvtph_ps(0xffff, (__m256i)bits);
}
FLASHONNX_INLINE ShortVec narrow(Vec x, Half) {
  return (ShortVec)_mm512_maskz_cvtps_ph(0xffff, (__m512)x, _MM_FROUND_TO_NEAREST_INT);
}
#elif defined(__AVX2__)
FLASHONNX_INLINE Vec widen(ShortVec bits, Half) { return (Vec)_mm256_cvtph_ps((__m128i)bits); }
FLASHONNX_INLINE ShortVec narrow(Vec x, Half) {
  return (ShortVec)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
}
#else
FLASHONNX_INLINE Vec widen(ShortVec half, Half) {
  const IntVec bits = __builtin_convertvector(half, IntVec);
  const IntVec magnitude = (bits & 0x7fff) << 13;
  const IntVec normal = magnitude + (112 << 23);  // the exponent's bias: 127 - 15
  const IntVec special = magnitude + (224 << 23);
  // A subnormal is a fixed-point number: give it an exponent, then subtract what that added.
  const Vec subnormal = (Vec)(magnitude + (113 << 23)) - 0x1p-14f;
  IntVec result = magnitude >= (0x7c00 << 13) ? special : normal;
  result = magnitude < (0x0400 << 13) ? (IntVec)subnormal : result;
  return (Vec)(result | ((bits & 0x8000) << 16));
}

FLASHONNX_INLINE ShortVec narrow(Vec x, Half) {
  const IntVec bits = (IntVec)x;
  const IntVec magnitude = bits & 0x7fffffff;
  const IntVec normal = (magnitude - (112 << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  // 0.5's unit in the last place is half's smallest subnormal, so the addition rounds to it.
  const IntVec subnormal = (IntVec)((Vec)magnitude + 0.5f) - 0x3f000000;
  IntVec result = magnitude < 0x38800000 ? subnormal : normal;
  result = magnitude >= 0x477ff000 ? IntVec{} + 0x7c00 : result;
  result = magnitude > 0x7f800000 ? IntVec{} + 0x7e00 : result;
  return __builtin_convertvector(result | ((bits >> 16) & 0x8000), ShortVec);
}
#endif

template <typename T>
FLASHONNX_INLINE Vec load(const T* p) {
  ShortVec bits;
  __builtin_memcpy(&bits, p, sizeof bits);
  return widen(bits, T{});
}

template <typename T>
FLASHONNX_INLINE void store(T* p, Vec x) {
  const ShortVec bits = narrow(x, T{});
  __builtin_memcpy(p, &bits, sizeof bits);
}

// The first `count` < kWidth elements; zeros follow.
template <typename T>
FLASHONNX_INLINE Vec load_part(const T* p, int count) {
  T part[kWidth] = {};
  for (int i = 0; i < count; ++i) part[i] = p[i];
  return load(part);
}

template <typename T>
FLASHONNX_INLINE void store_part(T* p, Vec x, int count) {
  T part[kWidth];
  store(part, x);
  for (int i = 0; i < count; ++i) p[i] = part[i];
}

// min(count, kWidth) elements.
template <typename T>
FLASHONNX_INLINE Vec load_upto(const T* p, int64_t count) {
  return count >= kWidth ? load(p) : load_part(p, static_cast<int>(count));
}

// -- across lanes

template <int... kIndex>
using Lanes = std::integer_sequence<int, kIndex...>;
using AllLanes = std::make_integer_sequence<int, kWidth>;

// A Vec is kQuads quads of 4 lanes. What crosses quads is dear, so blocks are transposed within
// them.
constexpr int kQuads = kWidth / 4;

// Lane i of quad l of the result is lane kPick[i] of quad l of a (below 4) or b (4 and up).
template <int k0, int k1, int k2, int k3, int... kIndex>
FLASHONNX_INLINE Vec pick(Vec a, Vec b, Lanes<kIndex...>) {
  constexpr int kPick[4] = {k0, k1, k2, k3};
  return __builtin_shufflevector(
      a, b, (kIndex / 4 * 4 + kPick[kIndex % 4] % 4 + kPick[kIndex % 4] / 4 * kWidth)...);
}

template <int k0, int k1, int k2, int k3>
FLASHONNX_INLINE Vec pick(Vec a, Vec b) {
  return pick<k0, k1, k2, k3>(a, b, AllLanes{});
}

// Quad l of the result is the 4 elements at p + l * step.
FLASHONNX_INLINE Vec load_quads(const float* p, int64_t step) {
  typedef float Quad __attribute__((vector_size(16)));
  Quad quads[kQuads];
#pragma GCC unroll 4
  for (int l = 0; l < kQuads; ++l) __builtin_memcpy(&quads[l], p + l * step, sizeof(Quad));
#if defined(__AVX512F__)
  const auto low = __builtin_shufflevector(quads[0], quads[1], 0, 1, 2, 3, 4, 5, 6, 7);
  const auto high = __builtin_shufflevector(quads[2], quads[3], 0, 1, 2, 3, 4, 5, 6, 7);
  return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#elif defined(__AVX2__)
  return __builtin_shufflevector(quads[0], quads[1], 0, 1, 2, 3, 4, 5, 6, 7);
#else
  return quads[0];
#endif
}

template <typename T>
FLASHONNX_INLINE Vec load_quads(const T* p, int64_t step) {
  typedef uint64_t Quads __attribute__((vector_size(2 * kWidth)));
  Quads quads;
#pragma GCC unroll 4
  for (int l = 0; l < kQuads; ++l) {
    uint64_t bits;
    __builtin_memcpy(&bits, p + l * step, sizeof bits);
    quads[l] = bits;
  }
  return widen((ShortVec)quads, T{});
}

// The even (kOdd = 0) or odd quads of a, then those of b.
template <int kOdd, int... kIndex>
FLASHONNX_INLINE Vec every_other_quad(Vec a, Vec b, Lanes<kIndex...>) {
  return __builtin_shufflevector(a, b, ((kIndex / 4 * 2 + kOdd) * 4 + kIndex % 4)...);
}

// Transposes the 4 x 4 blocks that quad l of the four rows makes, for each l.
FLASHONNX_INLINE void transpose_quads(Vec (&rows)[4]) {
  const Vec a = pick<0, 4, 1, 5>(rows[0], rows[1]);
  const Vec b = pick<2, 6, 3, 7>(rows[0], rows[1]);
  const Vec c = pick<0, 4, 1, 5>(rows[2], rows[3]);
  const Vec d = pick<2, 6, 3, 7>(rows[2], rows[3]);
  rows[0] = pick<0, 1, 4, 5>(a, c);
  rows[1] = pick<2, 3, 6, 7>(a, c);
  rows[2] = pick<0, 1, 4, 5>(b, d);
  rows[3] = pick<2, 3, 6, 7>(b, d);
}

// Lane n of the result is what combine makes of the lanes of rows[n].
template <typename Combine>
FLASHONNX_INLINE Vec reduce_each(const Vec* rows, Combine combine) {
  Vec quads[kQuads];  // lane i of the quads of quads[n] stem from rows[4 n + i]
#pragma GCC unroll 4
  for (int n = 0; n < kQuads; ++n) {
    Vec block[4] = {rows[4 * n], rows[4 * n + 1], rows[4 * n + 2], rows[4 * n + 3]};
    transpose_quads(block);
    quads[n] = combine(combine(block[0], block[1]), combine(block[2], block[3]));
  }
  if constexpr (kQuads > 1) {
#pragma GCC unroll 2
    for (int count = kQuads; count > 1; count /= 2) {
#pragma GCC unroll 2
      for (int n = 0; n < count / 2; ++n) {
        const Vec even = every_other_quad<0>(quads[2 * n], quads[2 * n + 1], AllLanes{});
        const Vec odd = every_other_quad<1>(quads[2 * n], quads[2 * n + 1], AllLanes{});
        quads[n] = combine(even, odd);
      }
    }
  }
  return quads[0];
}

FLASHONNX_INLINE Vec sum_each(const Vec* rows) {
  return reduce_each(rows, [](Vec a, Vec b) { return a + b; });
}

FLASHONNX_INLINE Vec max_each(const Vec* rows) {
  return reduce_each(rows, [](Vec a, Vec b) { return max(a, b); });
}

// -- functions

// e^x for x <= 0 to within 1.1 ulp, 0 where that is below the smallest normal number; NaN stays.
// e^x = 2^n e^r with |r| <= ln(2) / 2, and a minimax polynomial for e^r. Adding kRound leaves n +
// 127, the biased exponent, in the low bits of the sum.
FLASHONNX_INLINE Vec exp_nonpositive(Vec x) {
  constexpr float kRound = 0x1.8p23f + 127;
  const Vec shifted = x * 0x1.715476p0f + kRound;
  const Vec n = shifted - kRound;
  // ln(2) in two parts, the first exact times n.
  const Vec r = (x - n * 0x1.63p-1f) + n * 0x1.bd0106p-13f;
  Vec p = broadcast(0x1.6a23dp-10f);
  p = p * r + 0x1.123a2p-7f;
  p = p * r + 0x1.5558f2p-5f;
  p = p * r + 0x1.555492p-3f;
  p = p * r + 0x1.fffffcp-2f;
  p = p * (r * r) + r + 1.0f;
  const Vec result = p * (Vec)((IntVec)shifted << 23);
  return x < -87.33f ? Vec{} : result;
}

// tanh to within 2 ulp: Cephes' polynomial near 0, exponentials elsewhere.
FLASHONNX_INLINE Vec tanh(Vec x) {
  const IntVec sign = (IntVec)x & INT32_MIN;
  const Vec magnitude = (Vec)((IntVec)x ^ sign);
  const Vec square = x * x;
  Vec p = broadcast(-5.70498872745e-3f);
  p = p * square + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  const Vec near = x + x * square * p;
  const Vec e = exp_nonpositive(-2.0f * magnitude);
  const Vec far = (Vec)((IntVec)((1.0f - e) / (1.0f + e)) | sign);
  return magnitude < 0.625f ? near : far;
}

}  // namespace flashonnx::cpu::FLASHONNX_CPU_ISA

// Vectors of kWidth floats on GCC's and Clang's vector extensions, and the few functions that they lack.
#pragma once

#include <cfloat>
#include <cstdint>

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
FLASHONNX_INLINE Vec widen(ShortVec bits, Half) { return (Vec)_mm512_maskz_cvtph_ps(0xffff, (__m256i)bits); }
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

// -- across lanes

FLASHONNX_INLINE float sum_lanes(Vec x) {
  float sum = 0;
  for (int i = 0; i < kWidth; ++i) sum += x[i];
  return sum;
}

FLASHONNX_INLINE float max_lanes(Vec x) {
  float result = x[0];
  for (int i = 1; i < kWidth; ++i) result = x[i] > result ? x[i] : result;
  return result;
}

FLASHONNX_INLINE bool any(IntVec mask) {
  int32_t result = 0;
  for (int i = 0; i < kWidth; ++i) result |= mask[i];
  return result != 0;
}

#if defined(__AVX512F__)
#define FLASHONNX_LOW(a, b) \
  __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define FLASHONNX_HIGH(a, b) \
  __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#elif defined(__AVX2__)
#define FLASHONNX_LOW(a, b) __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define FLASHONNX_HIGH(a, b) __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#else
#define FLASHONNX_LOW(a, b) __builtin_shufflevector(a, b, 0, 4, 1, 5)
#define FLASHONNX_HIGH(a, b) __builtin_shufflevector(a, b, 2, 6, 3, 7)
#endif

// Transposes a kWidth x kWidth block: log2(kWidth) perfect shuffles of its rows.
FLASHONNX_INLINE void transpose(Vec (&rows)[kWidth]) {
#pragma GCC unroll 4
  for (int step = 1; step < kWidth; step *= 2) {
    Vec shuffled[kWidth];
#pragma GCC unroll 8
    for (int i = 0; i < kWidth / 2; ++i) {
      shuffled[2 * i] = FLASHONNX_LOW(rows[i], rows[i + kWidth / 2]);
      shuffled[2 * i + 1] = FLASHONNX_HIGH(rows[i], rows[i + kWidth / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i) rows[i] = shuffled[i];
  }
}

#undef FLASHONNX_LOW
#undef FLASHONNX_HIGH

// -- functions

// e^x for x <= 0 to within 1 ulp, 0 where that is below the smallest normal number; NaN stays. Cephes' expf: e^x = 2^n e^r with
// |r| <= ln(2) / 2. Adding kRound leaves n + 127, the biased exponent, in the low bits of the sum.
FLASHONNX_INLINE Vec exp_nonpositive(Vec x) {
  constexpr float kRound = 0x1.8p23f + 127;
  const Vec shifted = x * 0x1.715476p0f + kRound;
  const Vec n = shifted - kRound;
  const Vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vec p = broadcast(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
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

// Instead of the kernel's own device.cuh: asynchronous copies that really are late, and
// conversions.
#pragma once

#include "emulator.h"

namespace flashonnx::simt {

inline float* shared_memory() { return emulator::shared_memory(); }

inline void copy_async16(float* shared, const void* global, int bytes) {
  emulator::copy_async(shared, global, 16, bytes);
}
inline void copy_async4(float* shared, const void* global, int bytes) {
  emulator::copy_async(shared, global, 4, bytes);
}
inline void copy_wait() { emulator::copy_wait(); }

inline float exp2_approximate(float x) {
  const float y = std::exp2(x);
  return y < FLT_MIN ? 0.f : y;
}

inline float bits_to_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
inline uint32_t float_to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float half_to_float(uint16_t bits) {
  __half x;
  std::memcpy(&x, &bits, sizeof x);
  return __half2float(x);
}

inline float to_float(float x) { return x; }
inline float to_float(__half x) { return __half2float(x); }
inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
T from_float(float x);
template <>
inline float from_float<float>(float x) {
  return x;
}
template <>
inline __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

}  // namespace flashonnx::simt

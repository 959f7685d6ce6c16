// Rows of a mask, eight keys at a time: a quad of threads reads 32 of them.
#pragma once

#include <cstdint>
#include <type_traits>

namespace flashonnx::sm90 {

template <class Element>
struct Eight {
  Element x[8];
};

// `fill` stands for elements from `limit` on. Rows begin at multiples of 16 bytes.
template <class Element>
__device__ __forceinline__ Eight<Element> read_eight(const Element* row, int key, int limit,
                                                     Element fill) {
  using Vector = std::conditional_t<sizeof(Element) == 2, uint4, uint2>;
  if (key + 8 <= limit)
    return __builtin_bit_cast(Eight<Element>, __ldg(reinterpret_cast<const Vector*>(row + key)));
  Eight<Element> eight;
#pragma unroll
  for (int i = 0; i < 8; ++i) eight.x[i] = key + i < limit ? row[key + i] : fill;
  return eight;
}

}  // namespace flashonnx::sm90

// From global memory, in any strides and alignment, to float tiles in shared memory.
#pragma once

#include <type_traits>

#include "kernels/common/gather.h"
#include "kernels/simt/config.h"
#include "kernels/simt/device.cuh"

namespace flashonnx::simt {

// Where a chunk's elements stand. A warp reads 8 rows of K at once, kKeyVector apart: the exclusive
// or spreads them over the banks.
template <class C>
struct KeyChunk {
  static constexpr int kRows = C::kBlockKeys;
  static constexpr int kColumns = C::kKeyFeatures;
  static __device__ __forceinline__ int offset(int row, int column) {
    return row * kColumns + 4 * ((column / 4) ^ ((row / C::kKeyVector) & 7));
  }
};

// A warp reads 8 neighbouring vectors of one row of V: no conflicts as it is.
template <class C>
struct ValueChunk {
  static constexpr int kRows = C::kValueKeys;
  static constexpr int kColumns = C::kHeadDim;
  static __device__ __forceinline__ int offset(int row, int column) {
    return row * kColumns + column;
  }
};

// Q: chunks of kKeyFeatures, all the block's rows each. Half a warp reads rows r and r + 1 at once.
template <class C>
__device__ __forceinline__ int query_offset(int row, int column) {
  const int chunk = column / C::kKeyFeatures;
  const int vector = column % C::kKeyFeatures / 4;
  return (chunk * C::kBlockRows + row) * C::kKeyFeatures + 4 * (vector ^ (row & 3));
}

// Elements to float. float16 and bfloat16 share their kernels as bits, told apart here: fewer
// kernels to compile, for a selection per element that is loaded.
struct Widen {
  int32_t bfloat16;

  __device__ __forceinline__ float operator()(float x) const { return x; }
  __device__ __forceinline__ float operator()(uint16_t bits) const {
    return bfloat16 ? bits_to_float(static_cast<uint32_t>(bits) << 16) : half_to_float(bits);
  }
  template <class T>
  __device__ __forceinline__ float4 operator()(const T* at) const {
    const Widen& widen = *this;
    return {widen(at[0]), widen(at[1]), widen(at[2]), widen(at[3])};
  }
};

// Four elements, the first `valid` of them from memory and zeros after.
template <class T>
__device__ __forceinline__ float4 load4(const T* source, int valid, bool vectors, Widen widen) {
  struct alignas(4 * sizeof(T)) Four {
    T at[4];
  };
  Four four;
  if (vectors && valid >= 4) {
    four = *reinterpret_cast<const Four*>(source);
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e) four.at[e] = e < valid ? source[e] : T{0};
  }
  return widen(four.at);
}

// Q times the scale. Rows past `rows` and features up to the next multiple of 4 become zeros.
template <class T, class C>
__device__ __forceinline__ void load_queries(const T* source, int64_t stride, int rows,
                                             int features, float scale, bool vectors, Widen widen,
                                             float* shared) {
  for (int row = threadIdx.x / 16; row < C::kBlockRows; row += C::kThreads / 16) {
    for (int column = threadIdx.x % 16 * 4; column < features; column += 64) {
      float4 x =
          load4(source + row * stride + column, row < rows ? features - column : 0, vectors, widen);
      x.x *= scale, x.y *= scale, x.z *= scale, x.w *= scale;
      *reinterpret_cast<float4*>(shared + query_offset<C>(row, column)) = x;
    }
  }
}

// Rows of K or V that stand in pages.
template <class T>
struct PagedRows {
  const T* source;
  const Pages& pages;
  int64_t batch, page, row;
  int32_t first_key;

  // Null where there is no page.
  __device__ __forceinline__ const T* of(int index) const {
    const Slot slot = slot_of(pages, batch, first_key + index);
    return slot.page < 0 ? nullptr : source + slot.page * page + slot.slot * row;
  }
};

// Brings chunks in while the block computes on the one before: `begin` a chunk, compute, `finish`
// it, barrier, use it. float32 goes by asynchronous copies; 16-bit vectors wait in registers,
// because they are widened on the way. Rows that are not aligned for vectors go element by element;
// 16-bit ones then without overlap, to spare registers and code. A thread moves kPieces vectors of
// 16 bytes: one column of the chunk, every kRowStep-th row.
template <class T, class C>
class ChunkLoader {
  static constexpr bool kAsync = std::is_same_v<T, float>;
  static constexpr int kPiece = 16 / sizeof(T);
  static constexpr int kPieces = C::kChunk / kPiece / C::kThreads;
  static_assert(kPieces * kPiece * C::kThreads == C::kChunk);

 public:
  __device__ __forceinline__ explicit ChunkLoader(Widen widen) : widen_(widen) {}

  // `source`: the chunk's first element. Rows and columns from `rows` and `columns` on are not read
  // and become zeros. `vectors`: every row is aligned to 16 bytes, and `columns` is a multiple of
  // kPiece.
  template <class Chunk>
  __device__ __forceinline__ void begin(const T* source, int64_t stride, int rows, int columns,
                                        bool vectors, float* slot) {
    const int first_row = row_of<Chunk>(), column = column_of<Chunk>();
    if (vectors) {
      const T* from = source + first_row * stride + column;
      const int valid_rows = column < columns ? rows : 0;
#pragma unroll
      for (int i = 0; i < kPieces; ++i, from += kRowStep<Chunk> * stride) {
        const int row = first_row + i * kRowStep<Chunk>;
        const bool valid = row < valid_rows;
        if constexpr (kAsync) {
          copy_async16(slot + Chunk::offset(row, column), valid ? from : source, valid ? 16 : 0);
        } else {
          staged_[i] = valid ? *reinterpret_cast<const uint4*>(from) : uint4{};
        }
      }
      return;
    }
#pragma unroll 1
    for (int i = 0; i < kPieces; ++i) {
      const int row = first_row + i * kRowStep<Chunk>;
      load_elements<Chunk>(source + row * stride + column, source, row, column,
                           row < rows ? columns - column : 0, slot);
    }
  }

  // As well, of rows that stand in pages.
  template <class Chunk>
  __device__ __forceinline__ void begin(const PagedRows<T>& source, int rows, int columns,
                                        bool vectors, float* slot) {
    const int first_row = row_of<Chunk>(), column = column_of<Chunk>();
    if (vectors) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const int row = first_row + i * kRowStep<Chunk>;
        const T* from = row < rows && column < columns ? source.of(row) : nullptr;
        if constexpr (kAsync) {
          copy_async16(slot + Chunk::offset(row, column), from ? from + column : source.source,
                       from ? 16 : 0);
        } else {
          staged_[i] = from ? *reinterpret_cast<const uint4*>(from + column) : uint4{};
        }
      }
      return;
    }
#pragma unroll 1
    for (int i = 0; i < kPieces; ++i) {
      const int row = first_row + i * kRowStep<Chunk>;
      const T* from = row < rows ? source.of(row) : nullptr;
      load_elements<Chunk>(from ? from + column : source.source, source.source, row, column,
                           from ? columns - column : 0, slot);
    }
  }

  // Afterwards the chunk is in the slot, for this thread; for others after a barrier. `vectors` as
  // in `begin`. Returns whether one of this thread's elements is infinite or not a number, if
  // `check`.
  template <class Chunk>
  __device__ __forceinline__ bool finish(float* slot, bool vectors, bool check) {
    const int first_row = row_of<Chunk>(), column = column_of<Chunk>();
    if constexpr (kAsync) {
      copy_wait();
    } else if (vectors) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const T* at = reinterpret_cast<const T*>(&staged_[i]);
#pragma unroll
        for (int e = 0; e < kPiece; e += 4) {
          float4* to = reinterpret_cast<float4*>(
              slot + Chunk::offset(first_row + i * kRowStep<Chunk>, column + e));
          *to = widen_(at + e);
        }
      }
    }
    if (!check) return false;
    float sum = 0.f;  // of zeros, unless something is not finite
#pragma unroll 2
    for (int i = 0; i < kPieces; ++i) {
#pragma unroll
      for (int e = 0; e < kPiece; e += 4) {
        const float4 x = *reinterpret_cast<const float4*>(
            slot + Chunk::offset(first_row + i * kRowStep<Chunk>, column + e));
        sum = fmaf(x.x, 0.f, fmaf(x.y, 0.f, fmaf(x.z, 0.f, fmaf(x.w, 0.f, sum))));
      }
    }
    return sum != 0.f;
  }

 private:
  // The first `valid` of a piece's elements, and zeros. `base` is any address that may be read.
  template <class Chunk>
  __device__ __forceinline__ void load_elements(const T* from, const T* base, int row, int column,
                                                int valid, float* slot) {
#pragma unroll
    for (int e = 0; e < kPiece; ++e) {
      float* to = slot + Chunk::offset(row, column + e / 4 * 4) + e % 4;
      if constexpr (kAsync) {
        copy_async4(to, e < valid ? from + e : base, e < valid ? 4 : 0);
      } else {
        *to = e < valid ? widen_(from[e]) : 0.f;
      }
    }
  }

  template <class Chunk>
  static constexpr int kRowStep = C::kThreads * kPiece / Chunk::kColumns;
  template <class Chunk>
  static __device__ __forceinline__ int row_of() {
    return threadIdx.x / (Chunk::kColumns / kPiece);
  }
  template <class Chunk>
  static __device__ __forceinline__ int column_of() {
    return threadIdx.x % (Chunk::kColumns / kPiece) * kPiece;
  }

  Widen widen_;
  uint4 staged_[kAsync ? 1 : kPieces];
};

}  // namespace flashonnx::simt

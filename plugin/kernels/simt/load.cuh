// From global memory, in any strides and alignment, to float tiles in shared memory.
#pragma once

#include <type_traits>

#include "kernels/simt/config.h"
#include "kernels/simt/device.cuh"

namespace flashonnx::simt {

// Where a chunk's elements stand. A warp reads 8 rows of K at once, kKeyVector apart: the exclusive or spreads them over the banks.
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
  static __device__ __forceinline__ int offset(int row, int column) { return row * kColumns + column; }
};

// Q: chunks of kKeyFeatures, all the block's rows each. Half a warp reads rows r and r + 1 at once.
template <class C>
__device__ __forceinline__ int query_offset(int row, int column) {
  const int chunk = column / C::kKeyFeatures;
  const int vector = column % C::kKeyFeatures / 4;
  return (chunk * C::kBlockRows + row) * C::kKeyFeatures + 4 * (vector ^ (row & 3));
}

// Four elements, the first `valid` of them from memory and zeros after.
template <class T>
__device__ __forceinline__ float4 load4(const T* source, int valid, bool vectors) {
  struct alignas(4 * sizeof(T)) Four {
    T at[4];
  };
  Four four;
  if (vectors && valid >= 4) {
    four = *reinterpret_cast<const Four*>(source);
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e) four.at[e] = e < valid ? source[e] : from_float<T>(0.f);
  }
  return {to_float(four.at[0]), to_float(four.at[1]), to_float(four.at[2]), to_float(four.at[3])};
}

// Q times the scale. Rows past `rows` and features up to the next multiple of 4 become zeros.
template <class T, class C>
__device__ __forceinline__ void load_queries(const T* source, int64_t stride, int rows, int features, float scale,
                                             bool vectors, float* shared) {
  for (int row = threadIdx.x / 16; row < C::kBlockRows; row += C::kThreads / 16) {
    for (int column = threadIdx.x % 16 * 4; column < features; column += 64) {
      float4 x = load4(source + row * stride + column, row < rows ? features - column : 0, vectors);
      x.x *= scale, x.y *= scale, x.z *= scale, x.w *= scale;
      *reinterpret_cast<float4*>(shared + query_offset<C>(row, column)) = x;
    }
  }
}

// Brings chunks in while the block computes on the one before: `begin` a chunk, compute, `finish` it, barrier, use it.
// float32 goes by asynchronous copies; 16-bit elements wait in registers, because they are widened on the way.
template <class T, class C>
class ChunkLoader {
  static constexpr bool kAsync = std::is_same_v<T, float>;
  static constexpr int kPiece = 16 / sizeof(T);  // elements a thread moves at a time
  static constexpr int kPieces = C::kChunk / kPiece / C::kThreads;
  static_assert(kPieces * kPiece * C::kThreads == C::kChunk);

 public:
  // `source`: the chunk's first element. Rows and columns from `rows` and `columns` on are not read and become zeros.
  template <class Chunk>
  __device__ __forceinline__ void begin(const T* source, int64_t stride, int rows, int columns, bool vectors, float* slot) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int row = piece_row<Chunk>(i), column = piece_column<Chunk>(i);
      const int valid = row < rows ? max(min(columns - column, kPiece), 0) : 0;
      const T* from = valid > 0 ? source + row * stride + column : source;
      if constexpr (kAsync) {
        float* to = slot + Chunk::offset(row, column);
        if (vectors) {
          copy_async16(to, from, 4 * valid);
        } else {
#pragma unroll
          for (int e = 0; e < 4; ++e) copy_async4(to + e, e < valid ? from + e : from, e < valid ? 4 : 0);
        }
      } else if (vectors && valid == kPiece) {
        staged_[i] = *reinterpret_cast<const Piece*>(from);
      } else {
#pragma unroll
        for (int e = 0; e < kPiece; ++e) staged_[i].at[e] = e < valid ? from[e] : from_float<T>(0.f);
      }
    }
  }

  // Whether one of this thread's elements is infinite or not a number, if `check`.
  template <class Chunk>
  __device__ __forceinline__ bool finish(float* slot, bool check) {
    float sum = 0.f;  // of zeros, unless something is not finite
    if constexpr (kAsync) copy_wait();
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int row = piece_row<Chunk>(i), column = piece_column<Chunk>(i);
#pragma unroll
      for (int e = 0; e < kPiece; e += 4) {
        float4* to = reinterpret_cast<float4*>(slot + Chunk::offset(row, column + e));
        float4 x;
        if constexpr (kAsync) {
          if (!check) return false;
          x = *to;
        } else {
          const T* at = staged_[i].at + e;
          x = {to_float(at[0]), to_float(at[1]), to_float(at[2]), to_float(at[3])};
          *to = x;
        }
        sum = fmaf(x.x, 0.f, fmaf(x.y, 0.f, fmaf(x.z, 0.f, fmaf(x.w, 0.f, sum))));
      }
    }
    return check && sum != 0.f;
  }

 private:
  struct alignas(16) Piece {
    T at[kPiece];
  };

  template <class Chunk>
  static __device__ __forceinline__ int piece_row(int i) {
    return (threadIdx.x + i * C::kThreads) / (Chunk::kColumns / kPiece);
  }
  template <class Chunk>
  static __device__ __forceinline__ int piece_column(int i) {
    return (threadIdx.x + i * C::kThreads) % (Chunk::kColumns / kPiece) * kPiece;
  }

  Piece staged_[kAsync ? 1 : kPieces];
};

}  // namespace flashonnx::simt

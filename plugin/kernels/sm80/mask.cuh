// What stands between Q K^T and the softmax on some tiles: soft cap, mask and structural bounds.
// Scores and biases are in powers of 2 from here on (natural ones times log2 e).
//
// The bounds select -infinity, whatever a score was. A mask's -infinity is added, which costs less
// and comes to the same unless the masked score is infinite or NaN: careful.cuh is about that.
#pragma once

#include "kernels/common/bias.cuh"
#include "kernels/sm80/softmax.cuh"

namespace flashonnx::sm80 {

// factor * score + bias. An infinite or NaN score needs care to become -infinity where the bias is.
template <bool kCareful>
__device__ __forceinline__ float add_bias(float score, float factor, float bias) {
  return kCareful && bias == -INFINITY ? -INFINITY : fmaf(score, factor, bias);
}

// scores = factor * scores + bias of each key.
template <class C, bool kCareful>
__device__ __forceinline__ void add_key_biases(const Lane& lane, float factor, const float* biases,
                                               Scores<C>& scores) {
#pragma unroll
  for (int n = 0; n < C::kKeyTiles; n += 2) {
    const float4 bias = *reinterpret_cast<const float4*>(biases + lane.quad * C::kBiasRun + 2 * n);
#pragma unroll
    for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float (&a)[4] = scores.at[r][n], (&b)[4] = scores.at[r][n + 1];
        a[2 * h] = add_bias<kCareful>(a[2 * h], factor, bias.x);
        a[2 * h + 1] = add_bias<kCareful>(a[2 * h + 1], factor, bias.y);
        b[2 * h] = add_bias<kCareful>(b[2 * h], factor, bias.z);
        b[2 * h + 1] = add_bias<kCareful>(b[2 * h + 1], factor, bias.w);
      }
    }
  }
}

// scores = factor * scores + bias(mask), a row and a run of keys at a time. `row` + i *
// `row_stride` is the thread's row i of the warp, its first key; `keys` of them are inside the
// mask, the bounds remove the others. `vectors`: rows can be read by 16 bytes.
template <class M, class C, class Bias>
__device__ __forceinline__ void add_mask(const M* row, int64_t row_stride, int last_row,
                                         int64_t key_stride, int keys, bool vectors, float factor,
                                         Bias bias, Scores<C>& scores) {
  constexpr int kVector = 16 / sizeof(M), kPiece = kVector < C::kRun ? kVector : C::kRun;
  struct alignas(kPiece * sizeof(M)) Piece {
    M at[kPiece];
  };
  static_assert(C::kRun % kPiece == 0);
#pragma unroll
  for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const M* from = row + min(r * 16 + h * 8, last_row) * row_stride;
#pragma unroll
      for (int first = 0; first < C::kRun; first += kPiece) {
        Piece piece;
        if (vectors && first + kPiece <= keys) {
          piece = *reinterpret_cast<const Piece*>(from + first);
        } else {
#pragma unroll
          for (int e = 0; e < kPiece; ++e) {
            piece.at[e] = first + e < keys ? from[(first + e) * key_stride] : M{};
          }
        }
#pragma unroll
        for (int e = 0; e < kPiece; ++e) {
          float& score = scores.at[r][(first + e) / 2][2 * h + e % 2];
          score = fmaf(score, factor, bias(piece.at[e]));
        }
      }
    }
  }
}

// As well, of any type, and whatever the scores are: where the bias is -infinity, an infinite or
// NaN one becomes that.
template <class C>
__device__ __forceinline__ void add_mask_carefully(const Problem& p, int bytes, const char* row,
                                                   int last_row, int keys, float factor,
                                                   Scores<C>& scores) {
#pragma unroll
  for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const char* from = row + min(r * 16 + h * 8, last_row) * p.mask.row * bytes;
#pragma unroll
      for (int i = 0; i < C::kRun; ++i) {
        const uint32_t bits = i < keys ? mask_bits(from + i * p.mask_key * bytes, bytes) : 0;
        float& score = scores.at[r][i / 2][2 * h + i % 2];
        score = add_bias<true>(score, factor, mask_bias(bits, p.mask_dtype));
      }
    }
  }
}

// A mask that depends on the query. Each size of its elements is code of its own: of two bytes it
// is of Q's type, of four a float or an integer.
template <class T, class C, bool kCareful>
__device__ __forceinline__ void add_query_mask(const Problem& p, const Plan& plan, const Lane& lane,
                                               int64_t batch, int64_t head, int first_query,
                                               int first_key, int limit, float factor,
                                               Scores<C>& scores) {
  const int query = min(first_query + lane.warp * C::kWarpQueries + lane.row, p.q_length - 1);
  const int key = first_key + lane.quad * C::kRun;
  const char* const from = mask_element(p, plan, batch, head, query, key);
  const int last_row = p.q_length - 1 - query, keys = limit - key;
  if constexpr (kCareful) {
    add_mask_carefully<C>(p, plan.mask_bytes, from, last_row, keys, factor, scores);
    return;
  }
  const auto add = [&](auto* elements, auto bias) {
    using M = std::remove_const_t<std::remove_pointer_t<decltype(elements)>>;
    add_mask<M, C>(elements, p.mask.row, last_row, p.mask_key, keys, plan.mask_vectors, factor,
                   bias, scores);
  };
  if (plan.mask_bytes == 1) {
    add(reinterpret_cast<const int8_t*>(from), [](int8_t x) { return mask_bias(x); });
  } else if (plan.mask_bytes == 2) {
    add(reinterpret_cast<const T*>(from), [](T x) { return mask_bias(x); });
  } else {
    const bool boolean = p.mask_dtype == FLASHONNX_INT32;
    add(reinterpret_cast<const int32_t*>(from),
        [boolean](int32_t x) { return boolean ? mask_bias(x) : mask_bias(__int_as_float(x)); });
  }
}

// Asks for the block's rows of a mask that depends on the query. All keys of the tile are inside
// it.
template <class C>
__device__ __forceinline__ void prefetch_mask(const Problem& p, const Plan& plan, int64_t batch,
                                              int64_t head, int first_query, int first_key) {
  for (int row = threadIdx.x; row < C::kQueries; row += C::kThreads) {
    const int query = min(first_query + row, p.q_length - 1);
    const char* from = mask_element(p, plan, batch, head, query, first_key);
    for (int line = 0; line < C::kKeys * plan.mask_bytes; line += 128) prefetch(from + line);
  }
}

// Scale, soft cap and mask. After it the scores' factor is 1.
template <class T, class C, bool kCareful>
__device__ __forceinline__ void general_scores(const Problem& p, const Plan& plan, const Lane& lane,
                                               int64_t batch, int64_t head, int first_query,
                                               int first_key, int limit, const float* biases,
                                               Scores<C>& scores) {
  float factor = plan.factor;
  if (p.softcap > 0.f) {
    factor = 1.f;
#pragma unroll
    for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
      for (int n = 0; n < C::kKeyTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          scores.at[r][n][i] = plan.cap_out * tanh_approximate(plan.cap_in * scores.at[r][n][i]);
      }
    }
  }
  if (plan.mask_per_key) {
    add_key_biases<C, kCareful>(lane, factor, biases, scores);
  } else if (p.mask.data) {
    add_query_mask<T, C, kCareful>(p, plan, lane, batch, head, first_query, first_key, limit,
                                   factor, scores);
  } else {
#pragma unroll
    for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
      for (int n = 0; n < C::kKeyTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores.at[r][n][i] *= factor;
      }
    }
  }
}

template <class C>
__device__ __forceinline__ void apply_bounds(const KeyRange& range, const Lane& lane,
                                             int first_query, int first_key, Scores<C>& scores) {
  int query = first_query + lane.warp * C::kWarpQueries + lane.row;
  // The rows' bounds are found anew: kept, they would be spilled. At head size 128 masks are 8 %
  // slower for it.
  if constexpr (C::kDim == 64) asm volatile("" : "+r"(query));
#pragma unroll
  for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int lower = range.lower(query + r * 16 + h * 8);
      const unsigned seen = max(range.upper(query + r * 16 + h * 8) - lower, 0);
      const int first = first_key + lane.quad * C::kRun - lower;
#pragma unroll
      for (int n = 0; n < C::kKeyTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (static_cast<unsigned>(first + 2 * n + e) >= seen)
            scores.at[r][n][2 * h + e] = -INFINITY;
        }
      }
    }
  }
}

}  // namespace flashonnx::sm80

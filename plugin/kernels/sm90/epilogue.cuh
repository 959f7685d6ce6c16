// From a warp's sums to global memory.
#pragma once

#include "kernels/sm90/async.cuh"
#include "kernels/sm90/careful.cuh"
#include "kernels/sm90/quad.cuh"

namespace flashonnx::sm90 {

// Of a query's row of the output, in elements.
template <class C>
__device__ __forceinline__ int64_t place_of_row(const Problem& p, const ItemOf<C>& item,
                                                int query) {
  return item.work.batch * p.o.batch + item.work.head * p.o.head +
         (token_of<C>(item) + query) * p.o.row;
}

// A row's features go out by 16 bytes a thread, 64 of a quad: whole sectors.
template <class T, class C>
__device__ __forceinline__ void store_vectors(const Problem& p, const Lane& lane,
                                              const ItemOf<C>& item, const float (&scale)[2],
                                              const float (&output)[C::kOutputs]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int query = item.work.first_query + lane.first_row() + 8 * h;
    T* const row = static_cast<T*>(p.o.data) + place_of_row<C>(p, item, query);
#pragma unroll
    for (int n = 0; n < C::kValueDim / 8; n += 4) {
      uint32_t x[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* pair = output + 4 * (n + j) + 2 * h;
        x[j] = pack<T>(pair[0] * scale[h], pair[1] * scale[h]);
      }
      transpose_in_quad(lane.quad, x);
      const int feature = 8 * (n + lane.quad);
      if (query < queries_of<C>(p, item) && feature < p.value_dim)
        *reinterpret_cast<uint4*>(row + feature) = {x[0], x[1], x[2], x[3]};
    }
  }
}

// The warp's 16 rows go to shared memory, where its queries were, and from there by the copy
// engine.
template <class T, class C>
__device__ __forceinline__ void stage_rows(const Lane& lane, uint32_t rows, const float (&scale)[2],
                                           const float (&output)[C::kOutputs]) {
  const int row = lane.lane % 16, half = lane.lane / 16;  // of what this lane addresses
  const int swizzle = C::kBoxRow == 128 ? row % 8 : row / 2 % 4;
#pragma unroll
  for (int n = 0; n < C::kValueDim / 8; n += 2) {
    const uint32_t x[4] = {pack<T>(output[4 * n] * scale[0], output[4 * n + 1] * scale[0]),
                           pack<T>(output[4 * n + 2] * scale[1], output[4 * n + 3] * scale[1]),
                           pack<T>(output[4 * n + 4] * scale[0], output[4 * n + 5] * scale[0]),
                           pack<T>(output[4 * n + 6] * scale[1], output[4 * n + 7] * scale[1])};
    constexpr int kChunks = C::kBoxRow / 16;
    const uint32_t box = rows + n / kChunks * C::kQueries * C::kBoxRow;
    store_matrices(box + row * C::kBoxRow + ((n % kChunks + half) ^ swizzle) * 16, x);
  }
  fence_async();
  __syncwarp();
}

// Rows of a warp that `stage_rows` has staged, from there one by one: those from `rows` on are the
// next sequence's.
template <class T, class C>
__device__ __forceinline__ void store_staged_rows(const Problem& p, const Lane& lane,
                                                  uint32_t staged, int64_t place, int rows) {
  constexpr int kChunks = C::kBoxRow / 16, kRowChunks = C::kValueDim / 8;
#pragma unroll 1
  for (int i = lane.lane; i < rows * kRowChunks; i += 32) {
    const int row = i / kRowChunks, chunk = i % kRowChunks;
    if (chunk * 8 >= p.value_dim) continue;
    const int swizzle = C::kBoxRow == 128 ? row % 8 : row / 2 % 4;
    const uint32_t at = staged + (chunk / kChunks * C::kQueries + row) * C::kBoxRow +
                        (chunk % kChunks ^ swizzle) * 16;
    uint4 x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(at));
    *reinterpret_cast<uint4*>(static_cast<T*>(p.o.data) + place + row * p.o.row + chunk * 8) = x;
  }
}

template <class C>
__device__ __forceinline__ void store_elements(const Problem& p, const Lane& lane,
                                               const ItemOf<C>& item, const float (&scale)[2],
                                               const float (&output)[C::kOutputs]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int query = item.work.first_query + lane.first_row() + 8 * h;
    if (query >= queries_of<C>(p, item)) continue;
    const int64_t row = place_of_row<C>(p, item, query);
#pragma unroll
    for (int n = 0; n < C::kValueDim / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int feature = 8 * n + 2 * lane.quad + e;
        if (feature < p.value_dim)
          store_element(p, row + feature, output[4 * n + 2 * h + e] * scale[h]);
      }
    }
  }
}

// Rows that saw no key get the mean of V. Bit 4 i of an entry of `empty` is row i.
template <class T, class C>
__device__ __forceinline__ void store_means(const Problem& p, const Work& work, const Lane& lane,
                                            const uint32_t (&empty)[2]) {
  __syncwarp();  // zeros first
  float mean[C::kDim / 32];
  mean_of_values<T, C>(p, work, lane.lane, mean);
  const int first = work.first_query + lane.group * 64 + lane.warp * 16;
#pragma unroll 1
  for (int row = 0; row < min(16, p.q_length - first); ++row) {
    const uint32_t rows = row < 8 ? empty[0] : empty[1];
    if (rows >> row % 8 * 4 & 1) store_row<C>(p, work, first + row, lane.lane, 1.f, mean);
  }
}

// What comes of a warp's rows after the last key.
struct Ending {
  float scale[2];     // of the thread's rows
  uint32_t empty[2];  // bit 4 i: row i of the warp, or i + 8, saw no key
  bool careful;       // the rows have to be computed again
  bool means;         // rows that saw no key get the mean of V
  bool slow;          // one of these, or elements have to be written one by one
};

// Writes all but the rows themselves, which lack nothing then but their normalisers.
template <class T, class C>
__device__ __forceinline__ Ending end_rows(const Problem& p, const Plan& plan, const Lane& lane,
                                           const ItemOf<C>& item, bool careful,
                                           const RowState& state, float (&output)[C::kOutputs]) {
  Ending ending;
  float sums[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int query = item.work.first_query + lane.first_row() + 8 * h;
    const float summed = !C::kSumsByProducts || p.lse.data ? quad_sum(state.sum[h]) : 0.f;
    const float sum = C::kSumsByProducts ? output[C::kValueDim / 2 + 2 * h] : summed;
    sums[h] = sum;
    ending.scale[h] = normaliser(p, item.work.head, state.maximum[h], sum);
    if (!careful && lane.quad == 0 && query < queries_of<C>(p, item))
      store_lse(p, item.work, token_of<C>(item) + query, natural_lse(p, state.maximum[h], summed));
    ending.empty[h] = __ballot_sync(0xffffffffu, sum == 0.f);
  }
  if constexpr (C::kBiased) add_value_bias<T, C>(p, item.work.kv_head, lane.quad, sums, output);
  ending.careful = careful;
  ending.means = p.empty_row_mean && (ending.empty[0] | ending.empty[1]) != 0;
  ending.slow = careful || ending.means || plan.o_vectors == 0;
  return ending;
}

// Rows that do not leave the common way.
template <class T, class C>
__device__ __forceinline__ void store_slowly(const Problem& p, const Plan& plan, const Lane& lane,
                                             const ItemOf<C>& item, const Ending& ending,
                                             const float (&output)[C::kOutputs]) {
  if (ending.careful) {
    const int first_query = item.work.first_query + lane.group * 64 + lane.warp * 16;
    attend_carefully<T, C>(p, plan, item, first_query, lane.lane);
  } else {
    store_elements<C>(p, lane, item, ending.scale, output);
    if (ending.means) store_means<T, C>(p, item.work, lane, ending.empty);
  }
}

// The rows leave. `rows`: where the warp's rows of Q were, in shared memory. Returns whether the
// copy engine is reading from there.
template <class T, class C>
__device__ __forceinline__ bool store_rows(const Problem& p, const CUtensorMap& map,
                                           const Lane& lane, const ItemOf<C>& item, uint32_t rows,
                                           const float (&scale)[2],
                                           const float (&output)[C::kOutputs]) {
  if constexpr (C::kQueryStages == 1) {
    store_vectors<T, C>(p, lane, item, scale, output);
    return false;
  }
  stage_rows<T, C>(lane, rows, scale, output);
  const int first_query = item.work.first_query + lane.group * 64 + lane.warp * 16;
  if constexpr (C::kGathered) {
    if (p.ragged.queries && first_query + 16 > item.queries) {
      store_staged_rows<T, C>(p, lane, rows, place_of_row<C>(p, item, first_query),
                              item.queries - first_query);
      return false;
    }
  }
  if (lane.lane == 0) {
    const int batch = C::kGathered && p.ragged.queries ? 0 : item.work.batch;
#pragma unroll
    for (int box = 0; box < C::kValueBoxes; ++box) {
      store_box(&map, rows + box * C::kQueries * C::kBoxRow, box * C::kBox,
                token_of<C>(item) + first_query, item.work.head, batch);
    }
    commit_stores();
  }
  return true;
}

}  // namespace flashonnx::sm90

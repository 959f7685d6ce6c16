// Which sequence a token belongs to, and what belongs to no token: sequences and lengths.
#pragma once

#include <cstdint>
#include <cstdio>

#include "kernels/cache/prepare.h"

namespace flashonnx::cache {

constexpr int kBlockThreads = 128;
// How rows of so many parts are dealt out: `lanes` rows at a time to a block's threads, by `blocks`
// blocks of a token.
struct Deal {
  int32_t parts, lanes, blocks;
};

struct Job {
  Params given;    // the caller's problem
  Params problem;  // of which key_lengths, cu_seqlens_*, q, k, v, o and lse are written
  int32_t ragged, cache, append, rotary;
  int32_t tokens;
  int32_t pairs;               // parts of a rotated row that are pairs; the others are copied
  Deal rotated, keys, values;  // rows of Q and K, of K, of V
  int32_t log;
};

// A token's sequence, its number there and how many there are. Of a token in no sequence, b is -1.
struct Token {
  int32_t b, i, tokens;
};

__device__ inline int32_t warp_maximum(int32_t x) { return __reduce_max_sync(0xffffffffu, x); }

// Sequences begin at the running maximum of the given numbers, clamped to [0, tokens]. So the one
// that ends first behind `row` is the row's. All lanes of a warp take part.
__device__ inline Token find_token(const Job& job, int32_t row) {
  const Params& p = job.given;
  if (!job.ragged) {
    const auto length = static_cast<uint32_t>(p.q_length), at = static_cast<uint32_t>(row);
    return {static_cast<int32_t>(at / length), static_cast<int32_t>(at % length),
            static_cast<int32_t>(length)};
  }
  const auto* given = static_cast<const int32_t*>(p.cu_seqlens_q.data);
  const int64_t stride = p.cu_seqlens_q.stride[0];
  const int32_t lane = threadIdx.x % 32, count = static_cast<int32_t>(p.batch) + 1;
  int32_t begin = 0;
  for (int32_t first = 0; first < count; first += 32) {
    const int32_t value = first + lane < count ? given[(first + lane) * stride] : -1;
    const uint32_t behind = __ballot_sync(0xffffffffu, value > row);
    const int32_t found = behind ? __ffs(static_cast<int>(behind)) - 1 : 32;
    begin = max(begin, warp_maximum(lane < found ? value : 0));
    if (behind == 0) continue;
    const int32_t end = min(__shfl_sync(0xffffffffu, value, found), job.tokens);
    const int32_t b = first + found - 1;
    return {b, row - begin, end - begin};  // b is -1 before the first
  }
  return {-1, 0, 0};
}

// Running maxima, by one warp.
__device__ inline void order_sequences(const flashonnx_tensor& given, int64_t batch, int32_t tokens,
                                       const flashonnx_tensor& target, const char* name, bool log) {
  const auto* source = static_cast<const int32_t*>(given.data);
  auto* out = static_cast<int32_t*>(target.data);
  const int32_t lane = threadIdx.x % 32;
  int32_t before = 0;
  bool changed = false;
  for (int64_t first = 0; first <= batch; first += 32) {
    const bool inside = first + lane <= batch;
    const int32_t value = inside ? source[(first + lane) * given.stride[0]] : 0;
    int32_t largest = max(before, min(value, tokens));
    for (int step = 1; step < 32; step *= 2) {
      const int32_t other = __shfl_up_sync(0xffffffffu, largest, step);
      if (lane >= step) largest = max(largest, other);
    }
    if (inside) out[first + lane] = largest;
    changed |= inside && largest != value;
    before = __shfl_sync(0xffffffffu, largest, 31);
  }
  if (log && __any_sync(0xffffffffu, changed) && lane == 0)
    printf("flashonnx: %s is out of order, or of [0, %d]: brought into them\n", name, tokens);
}

// What belongs to no token: sequences and lengths. By the whole block.
__device__ inline void count(const Job& job) {
  const Params& p = job.given;
  if (threadIdx.x == 0) {  // for a kernel to count with
    if (job.ragged) static_cast<int32_t*>(job.problem.cu_seqlens_q.data)[p.batch + 1] = 0;
    if (job.cache) static_cast<int32_t*>(job.problem.key_lengths.data)[p.batch] = 0;
  }
  if (threadIdx.x < 32 && job.ragged) {
    order_sequences(p.cu_seqlens_q, p.batch, job.tokens, job.problem.cu_seqlens_q, "cu_seqlens_q",
                    job.log);
  }
  if (threadIdx.x >= 32 && threadIdx.x < 64 && p.cu_seqlens_k.dtype != FLASHONNX_NONE) {
    order_sequences(p.cu_seqlens_k, p.batch, static_cast<int32_t>(p.kv_tokens),
                    job.problem.cu_seqlens_k, "cu_seqlens_k", job.log);
  }
  if (!job.cache) return;
  __syncthreads();  // the sequences are there, also for others of the block
  const auto* sequences = static_cast<const int32_t*>(job.problem.cu_seqlens_q.data);
  auto* lengths = static_cast<int32_t*>(job.problem.key_lengths.data);
  for (int64_t b = threadIdx.x; b < p.batch; b += kBlockThreads) {
    const int64_t tokens = job.ragged ? sequences[b + 1] - sequences[b] : p.q_length;
    const int64_t added = job.append ? tokens : 0, before = cached_keys(p, b);
    const int64_t wanted = before + added;
    lengths[b] = static_cast<int32_t>(wanted < p.cache_capacity ? wanted : p.cache_capacity);
    const int64_t given = integer_at(p.cache_lengths, b * p.cache_lengths.stride[0]);
    if (job.log && (given != before || wanted > p.cache_capacity)) {
      printf(
          "flashonnx: sequence %lld: cache_lengths %lld and %lld new keys do not fit into %lld "
          "slots: what is outside is dropped\n",
          static_cast<long long>(b), static_cast<long long>(given), static_cast<long long>(added),
          static_cast<long long>(p.cache_capacity));
    }
  }
}

// Whether a row has to be cleared, each lane its own; as `find_token`, for 32 rows at once.
__device__ inline bool has_no_query(const Job& job, int32_t row) {
  const Params& p = job.given;
  const auto* given = static_cast<const int32_t*>(p.cu_seqlens_q.data);
  const int32_t lane = threadIdx.x % 32, count = static_cast<int32_t>(p.batch) + 1;
  int32_t begin = 0, behind = 0;  // numbers up to the row
  bool found = false;
  for (int32_t first = 0; first < count && !__all_sync(0xffffffffu, found); first += 32) {
    const int32_t value =
        first + lane < count ? given[(first + lane) * p.cu_seqlens_q.stride[0]] : 0;
    const int32_t first_row = row - lane;
    const bool differs = found || (value > first_row && value < first_row + 32);
    if (!__any_sync(0xffffffffu, differs)) {  // of all rows, the same ones are behind
      const uint32_t beyond = __ballot_sync(0xffffffffu, value > first_row);
      const int32_t before = beyond != 0 ? __ffs(static_cast<int>(beyond)) - 1 : 32;
      found = beyond != 0;
      begin = max(begin, warp_maximum(lane < before ? value : 0));
      behind += min(before, count - first);
      continue;
    }
    for (int32_t i = 0; i < min(count - first, 32); ++i) {
      const int32_t x = __shfl_sync(0xffffffffu, value, i);
      found |= x > row;
      if (!found) begin = max(begin, x), ++behind;
    }
  }
  return !found || behind == 0 || row - begin >= p.q_length;
}

}  // namespace flashonnx::cache

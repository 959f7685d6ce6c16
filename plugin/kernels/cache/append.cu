// Rotary embeddings, new keys and values into their slots, lengths and sequences: one launch,
// before the attention kernel.
//
// Grid: x, a block for each token, then one for what belongs to no token; y, blocks for the rows
// that are rotated, then for those of K and of V that are copied. Block: 128 threads; each has the
// same part of several rows, `V` elements, or of both halves of a rotated row. Memory-bound: 16
// bytes an access where everything is aligned.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <type_traits>

#include "kernels/cache/prepare.h"
#include "kernels/cache/sequences.cuh"
#include "kernels/common/carveout.h"
#include "kernels/common/overlap.cuh"

namespace flashonnx {
namespace {

using namespace cache;

// Rows whose elements a thread asks for before it needs any.
constexpr int kRows = 4;

template <class T>
__device__ float to_float(T x) {
  return static_cast<float>(x);
}

template <class T>
__device__ T from_float(float x) {
  if constexpr (sizeof(T) == 4) {
    return x;
  } else if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(x);
  } else {
    return __float2bfloat16_rn(x);
  }
}

template <class T, int V>
struct alignas(V * sizeof(T)) Vector {
  T element[V];
};

template <class T, int V>
__device__ void load(const void* data, int64_t element, T* x) {
  *reinterpret_cast<Vector<T, V>*>(x) =
      *reinterpret_cast<const Vector<T, V>*>(static_cast<const T*>(data) + element);
}

template <class T, int V>
__device__ void store(void* data, int64_t element, const T* x) {
  *reinterpret_cast<Vector<T, V>*>(static_cast<T*>(data) + element) =
      *reinterpret_cast<const Vector<T, V>*>(x);
}

template <class T>
__device__ void rotate(T& a, T& b, float cos, float sin) {
  const float re = to_float(a), im = to_float(b);
  a = from_float<T>(re * cos - im * sin);
  b = from_float<T>(im * cos + re * sin);
}

// `V` numbers of a rotary table.
template <class T, int V>
__device__ void read_table(const flashonnx_tensor& table, int64_t element, float (&out)[V]) {
  if (table.dtype == FLASHONNX_FLOAT32) {
    constexpr int kStep = V < 4 ? V : 4;
#pragma unroll
    for (int i = 0; i < V; i += kStep) load<float, kStep>(table.data, element + i, out + i);
  } else {
    alignas(16) T values[V];
    load<T, V>(table.data, element, values);
#pragma unroll
    for (int i = 0; i < V; ++i) out[i] = to_float(values[i]);
  }
}

__device__ int64_t offset_of(const Job& job, const Token& token, int32_t row, int64_t head,
                             const flashonnx_tensor& tensor) {
  return head * tensor.stride[1] + (job.ragged ? row : token.i) * tensor.stride[2] +
         (job.ragged ? 0 : token.b * tensor.stride[0]);
}

// The place of a token's key (of head 0) in a cache; -1: it has none.
__device__ int64_t place_of(const Job& job, const Token& token, const flashonnx_tensor& cache) {
  return place_of_key(job.given, cache, token.b, 0, cached_keys(job.given, token.b) + token.i);
}

// Calls body(part, first row, step between rows) for each part, of `units`, that is this thread's.
template <class Body>
__device__ void deal_out(const Deal& deal, int32_t block, int32_t units, Body body) {
  const int32_t lane = threadIdx.x / deal.parts;
  if (lane >= deal.lanes) return;
  for (int32_t part = threadIdx.x % deal.parts; part < units; part += deal.parts)
    body(part, block * deal.lanes + lane, deal.blocks * deal.lanes);
}

// The heads of K or V of a token, to its place in the cache.
template <class T, int V>
__device__ void copy_heads(const Job& job, const Token& token, int32_t row, int32_t block,
                           const Deal& deal, const flashonnx_tensor& source,
                           const flashonnx_tensor& target, int64_t dim) {
  const int64_t from = offset_of(job, token, row, 0, source);
  int64_t to = -1;
  const int32_t heads = static_cast<int32_t>(job.given.kv_heads);
  deal_out(
      deal, block, static_cast<int32_t>(dim / V), [&](int32_t part, int32_t first, int32_t step) {
        for (int32_t head = first; head < heads; head += kRows * step) {
          alignas(16) T x[kRows][V];
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            if (head + i * step >= heads) break;
            load<T, V>(source.data, from + (head + i * step) * source.stride[1] + part * V, x[i]);
          }
          // After the elements were asked for: they do not depend on lengths.
          if (head == first) to = place_of(job, token, target);
          if (to < 0) return;
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            if (head + i * step >= heads) break;
            store<T, V>(target.data, to + (head + i * step) * target.stride[1] + part * V, x[i]);
          }
        }
      });
}

// V pairs of a row, features d.. with d + half.., or 2 d with 2 d + 1.., which are rotated; or V
// features that follow those.
struct Part {
  int64_t first, second;
  bool pairs;
};

template <int V>
__device__ Part part_of(const Job& job, int32_t part) {
  const int64_t d = int64_t{part} * V, dim = job.given.rotary_dim;
  if (part >= job.pairs) return {dim + d - int64_t{job.pairs} * V, 0, false};
  if (job.given.rotary_interleaved) return {2 * d, 2 * d + V, true};
  return {d, d + dim / 2, true};
}

template <class T, int V>
__device__ void rotate_pairs(bool interleaved, const float (&cos)[V], const float (&sin)[V],
                             T (&x)[2 * V]) {
  if (interleaved) {
#pragma unroll
    for (int i = 0; i < V; ++i) rotate(x[2 * i], x[2 * i + 1], cos[i], sin[i]);
  } else {
#pragma unroll
    for (int i = 0; i < V; ++i) rotate(x[i], x[V + i], cos[i], sin[i]);
  }
}

// The heads of Q of a token, and those of K if they are appended, rotated.
template <class T, int V>
__device__ void rotate_heads(const Job& job, const Token& token, int32_t row, int32_t block) {
  const Params& p = job.given;
  const int64_t q_from = offset_of(job, token, row, 0, p.q);
  const int64_t q_to = offset_of(job, token, row, 0, job.problem.q);
  const int64_t k_from = job.append ? offset_of(job, token, row, 0, p.k) : 0;
  const int32_t q_heads = static_cast<int32_t>(p.q_heads);
  const int32_t heads = q_heads + (job.append ? static_cast<int32_t>(p.kv_heads) : 0);
  const int32_t units = job.pairs + static_cast<int32_t>((p.head_dim - p.rotary_dim) / V);
  deal_out(job.rotated, block, units, [&](int32_t unit, int32_t first, int32_t step) {
    const Part part = part_of<V>(job, unit);
    alignas(16) float cos[V], sin[V];
    int64_t k_to = -1;
    for (int32_t head = first; head < heads; head += kRows * step) {
      alignas(16) T x[kRows][2 * V];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int32_t h = head + i * step;
        if (h >= heads) break;
        const void* source = h < q_heads ? p.q.data : p.k.data;
        const int64_t from =
            h < q_heads ? q_from + h * p.q.stride[1] : k_from + (h - q_heads) * p.k.stride[1];
        load<T, V>(source, from + part.first, x[i]);
        if (part.pairs) load<T, V>(source, from + part.second, x[i] + V);
      }
      if (head == first) {  // after the elements were asked for: they do not depend on lengths
        if (job.append) k_to = place_of(job, token, job.problem.k);
        if (part.pairs) {
          const int64_t position = rotary_position(p, token.b, token.i, token.tokens, row);
          const int64_t d = int64_t{unit} * V;
          read_table<T, V>(p.rotary_cos, position * p.rotary_cos.stride[0] + d, cos);
          read_table<T, V>(p.rotary_sin, position * p.rotary_sin.stride[0] + d, sin);
        }
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int32_t h = head + i * step;
        if (h >= heads || (h >= q_heads && k_to < 0)) break;
        if (part.pairs) rotate_pairs<T, V>(p.rotary_interleaved, cos, sin, x[i]);
        void* target = h < q_heads ? job.problem.q.data : job.problem.k.data;
        const int64_t to = h < q_heads ? q_to + h * job.problem.q.stride[1]
                                       : k_to + (h - q_heads) * job.problem.k.stride[1];
        store<T, V>(target, to + part.first, x[i]);
        if (part.pairs) store<T, V>(target, to + part.second, x[i] + V);
      }
    }
  });
}

__device__ void report_missing_page(const Job& job, const Token& token) {
  const int64_t slot = cached_keys(job.given, token.b) + token.i;
  if (slot >= job.given.cache_capacity || place_of(job, token, job.problem.v) >= 0) return;
  printf("flashonnx: sequence %d: slot %lld has no page: its key is dropped\n", token.b,
         static_cast<long long>(slot));
}

// A row of O that no sequence has, or that is too far into its own, by `threads` of them.
__device__ void clear_row(const Job& job, int32_t row, int32_t first, int32_t threads) {
  const Params& p = job.given;
  const int64_t elements = p.q_heads * p.value_dim;
  for (int64_t i = first; i < elements; i += threads) {
    const int64_t at = i / p.value_dim * p.o.stride[1] + row * p.o.stride[2] + i % p.value_dim;
    if (p.o.dtype == FLASHONNX_FLOAT32) {
      static_cast<float*>(p.o.data)[at] = 0;
    } else {
      static_cast<uint16_t*>(p.o.data)[at] = 0;
    }
  }
  if (p.lse.dtype == FLASHONNX_NONE) return;
  for (int64_t head = first; head < p.q_heads; head += threads) {
    static_cast<float*>(p.lse.data)[head * p.lse.stride[1] + row * p.lse.stride[2]] = -INFINITY;
  }
}

// Brings a batch entry's row of the block table to the second-level cache, while the kernel before
// still runs: the attention kernel's look-ups would come from memory, and its keys after them.
__device__ void prefetch_table(const Params& p, int64_t b) {
  if (p.page_size == 0 || b >= p.batch) return;
  constexpr uint32_t kLine = 128 / sizeof(int32_t);
  const auto* const row =
      static_cast<const int32_t*>(p.block_table.data) + b * p.block_table.stride[0];
  const uint32_t pages =
      static_cast<uint32_t>(p.cache_capacity) / static_cast<uint32_t>(p.page_size);
  for (uint32_t page = threadIdx.x * kLine; page < pages; page += kBlockThreads * kLine)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(row + page * p.block_table.stride[1]));
}

// Brings what the way to a place needs of the parameters near, while the kernel before still runs:
// each line of them would be waited for, one after the other.
__device__ void touch_parameters(const Job& job) {
  const Params &p = job.given, &problem = job.problem;
  int64_t seen = p.head_dim ^ p.kv_heads ^ p.cache_capacity ^ job.tokens ^ job.values.blocks;
  const auto touch = [&seen](const flashonnx_tensor& tensor) {
    seen ^= reinterpret_cast<intptr_t>(tensor.data) ^ tensor.stride[2] ^ tensor.dtype;
  };
  touch(p.k), touch(p.v), touch(p.cache_lengths), touch(p.block_table);
  touch(problem.k), touch(problem.v);
  if (job.rotary) touch(p.q), touch(problem.q), touch(p.rotary_cos), touch(p.rotary_sin);
  if (seen == 0x7f4a7c15) __nanosleep(0);  // or the compiler would leave it all out
}

template <class T, int V>
__global__ void __launch_bounds__(kBlockThreads) append_kernel(const __grid_constant__ Job job) {
  touch_parameters(job);
  if (blockIdx.y == 0) prefetch_table(job.given, blockIdx.x);
  wait_for_predecessor();
  // What follows takes its place now; not before, as the kernel before still has it.
  let_dependents_launch();
  const int64_t block = blockIdx.x;
  if (block == job.tokens) {
    if (blockIdx.y == 0) count(job);
    return;
  }
  const auto row = static_cast<int32_t>(block);
  const Token token = find_token(job, row);
  const bool inside = token.b >= 0;
  if (job.ragged && (!inside || token.i >= job.given.q_length)) {
    clear_row(job, row, blockIdx.y * kBlockThreads + threadIdx.x, gridDim.y * kBlockThreads);
  }
  if (!inside) return;
  const Params& p = job.given;
  int32_t part = static_cast<int32_t>(blockIdx.y);
  if (part < job.rotated.blocks) return rotate_heads<T, V>(job, token, row, part);
  part -= job.rotated.blocks;
  if (part < job.keys.blocks) {
    return copy_heads<T, V>(job, token, row, part, job.keys, p.k, job.problem.k, p.head_dim);
  }
  part -= job.keys.blocks;
  if (part >= job.values.blocks) return;
  if (job.log && part == 0 && threadIdx.x == 0) report_missing_page(job, token);
  copy_heads<T, V>(job, token, row, part, job.values, p.v, job.problem.v, p.value_dim);
}

// Where tokens have no work of their own: what belongs to none, and rows to be cleared, 32 a warp.
__global__ void __launch_bounds__(kBlockThreads) order_kernel(const __grid_constant__ Job job) {
  wait_for_predecessor();
  let_dependents_launch();
  if (blockIdx.x == gridDim.x - 1) return count(job);
  const auto first = static_cast<int32_t>(blockIdx.x * kBlockThreads + threadIdx.x / 32 * 32);
  const int32_t lane = threadIdx.x % 32, row = first + lane;
  uint32_t rows = __ballot_sync(0xffffffffu, has_no_query(job, row) && row < job.tokens);
  for (; rows != 0; rows &= rows - 1)
    clear_row(job, first + __ffs(static_cast<int>(rows)) - 1, lane, 32);
}

// Whether all rows of the tensor consist of whole, aligned vectors of 16 bytes.
bool aligned(const flashonnx_tensor& tensor, int64_t dim, int64_t size) {
  if (tensor.dtype == FLASHONNX_NONE) return true;
  bool result = reinterpret_cast<uintptr_t>(tensor.data) % 16 == 0 && dim * size % 16 == 0;
  for (int i = 0; i < 3; ++i) result &= tensor.stride[i] * size % 16 == 0;
  return result;
}

bool all_aligned(const Job& job, int64_t size) {
  const Params& p = job.given;
  bool result = aligned(p.k, p.head_dim, size) && aligned(p.v, p.value_dim, size) &&
                (!job.append || (aligned(job.problem.k, p.head_dim, size) &&
                                 aligned(job.problem.v, p.value_dim, size)));
  if (!job.rotary) return result;
  // A unit is a vector of each half, so both begin at whole vectors, as does what follows them.
  const int64_t table_size = p.rotary_cos.dtype == FLASHONNX_FLOAT32 ? 4 : size;
  for (const flashonnx_tensor* table : {&p.rotary_cos, &p.rotary_sin}) {
    result &= reinterpret_cast<uintptr_t>(table->data) % 16 == 0 &&
              table->stride[0] * table_size % 16 == 0;
  }
  return result && aligned(p.q, p.head_dim, size) && aligned(job.problem.q, p.head_dim, size) &&
         p.rotary_dim / 2 * size % 16 == 0;
}

// `rows` rows of `units` parts each. Few tokens leave the device idle unless each of their rows has
// threads of its own.
Deal deal_of(int64_t rows, int64_t units, int32_t tokens) {
  constexpr int32_t kManyTokens = 512, kMostBlocks = 1024;
  if (rows == 0) return {1, 0, 0};
  const auto parts = static_cast<int32_t>(std::min<int64_t>(units, kBlockThreads));
  const int32_t lanes = kBlockThreads / parts;
  const int64_t each = int64_t{lanes} * (tokens >= kManyTokens ? kRows : 1);
  return {parts, lanes,
          static_cast<int32_t>(std::min<int64_t>((rows + each - 1) / each, kMostBlocks))};
}

// A launch that may begin early: every kernel here waits for the one before it.
template <class Kernel>
flashonnx_status launch_overlapping(const Job& job, Kernel* kernel, dim3 grid, cudaStream_t stream,
                                    const char* name) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(kBlockThreads);
  config.stream = stream;
  cudaLaunchAttribute attributes[] = {overlap_attribute(), shared_memory_attribute()};
  bool hopper = false, overlaps = false;
  FLASHONNX_RETURN_IF_ERROR(has_hopper_code(reinterpret_cast<const void*>(kernel), &hopper));
  FLASHONNX_RETURN_IF_ERROR(driver_overlaps(&overlaps));
  config.attrs = attributes;
  config.numAttrs = hopper && overlaps && job.given.device.arch == 90 ? 2 : 0;
  return cuda_status(cudaLaunchKernelEx(&config, kernel, job), name);
}

template <class T, int V>
flashonnx_status launch(Job job, cudaStream_t stream) {
  const Params& p = job.given;
  const int64_t new_heads = job.append ? p.kv_heads : 0;
  if (job.rotary) {
    job.pairs = static_cast<int32_t>(p.rotary_dim / 2 / V);
    job.rotated =
        deal_of(p.q_heads + new_heads, job.pairs + (p.head_dim - p.rotary_dim) / V, job.tokens);
  } else {
    job.keys = deal_of(new_heads, p.head_dim / V, job.tokens);
  }
  job.values = deal_of(new_heads, p.value_dim / V, job.tokens);
  const int32_t blocks = job.rotated.blocks + job.keys.blocks + job.values.blocks;
  const dim3 grid(static_cast<unsigned>(job.tokens) + 1, std::max(blocks, 1));
  return launch_overlapping(job, append_kernel<T, V>, grid, stream, "cache append kernel");
}

}  // namespace

flashonnx_status prepare_cuda(const Params& params, const Params& problem, void* stream) {
  Job job = {};
  job.given = params;
  job.problem = problem;
  job.ragged = params.cu_seqlens_q.dtype != FLASHONNX_NONE;
  job.cache = params.cache_k.dtype != FLASHONNX_NONE;
  job.append = job.cache && params.k.dtype != FLASHONNX_NONE;
  job.rotary = params.rotary_dim > 0;
  job.log = log_enabled();
  if (params.batch == 0 && !job.ragged) return ok();
  // Without work of their own, tokens need no blocks; rows of a ragged batch may have to be
  // cleared.
  if (job.ragged || job.append || job.rotary) {
    job.tokens =
        static_cast<int32_t>(job.ragged ? params.q_tokens : params.batch * params.q_length);
  }
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (!job.append && !job.rotary) {
    const dim3 grid(static_cast<unsigned>(job.tokens + kBlockThreads - 1) / kBlockThreads + 1);
    return launch_overlapping(job, order_kernel, grid, cuda_stream, "sequence order kernel");
  }
  const bool float32 = params.q.dtype == FLASHONNX_FLOAT32;
  const bool vectors = all_aligned(job, float32 ? 4 : 2);
  if (float32)
    return vectors ? launch<float, 4>(job, cuda_stream) : launch<float, 1>(job, cuda_stream);
  if (params.q.dtype == FLASHONNX_FLOAT16)
    return vectors ? launch<__half, 8>(job, cuda_stream) : launch<__half, 1>(job, cuda_stream);
  return vectors ? launch<__nv_bfloat16, 8>(job, cuda_stream)
                 : launch<__nv_bfloat16, 1>(job, cuda_stream);
}

}  // namespace flashonnx

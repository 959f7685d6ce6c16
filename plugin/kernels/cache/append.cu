// Rotary embeddings, new keys and values into their slots, lengths and sequences: one launch,
// before the attention kernel.
//
// Grid: x, a block for each token, then one for what belongs to no token; y, as many blocks as a
// token's rows take. Block: 256 threads, each with one unit: `V` elements of a row, or of both
// halves of a rotated one. Memory-bound: 16 bytes an access where everything is aligned.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <type_traits>

#include "kernels/cache/prepare.h"
#include "kernels/common/cuda.h"

namespace flashonnx {
namespace {

constexpr int kThreads = 256;

struct Job {
  Params given;    // the caller's problem
  Params problem;  // of which key_lengths, cu_seqlens_*, q, k, v, o and lse are written
  int32_t ragged, cache, append, rotary;
  int32_t tokens;
  int32_t pair_units;                          // of a rotated row: its pairs
  int32_t head_units, key_units, value_units;  // of a row of Q, K (with its pairs) and V
  int32_t units;                               // of a token
  int32_t log;
};

// A token's sequence, its number there and how many there are. Of a token in no sequence, b is -1.
struct Token {
  int32_t b, i, tokens;
};

__device__ int32_t warp_maximum(int32_t x) { return __reduce_max_sync(0xffffffffu, x); }

// Sequences begin at the running maximum of the given numbers, clamped to [0, tokens]. So the one
// that ends first behind `row` is the row's. All lanes of a warp take part.
__device__ Token find_token(const Job& job, int32_t row) {
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
__device__ void order_sequences(const flashonnx_tensor& given, int64_t batch, int32_t tokens,
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
__device__ void count(const Job& job) {
  const Params& p = job.given;
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
  for (int64_t b = threadIdx.x; b < p.batch; b += kThreads) {
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

template <class T, int V>
__device__ void copy(const void* source, int64_t from, void* target, int64_t to) {
  *reinterpret_cast<Vector<T, V>*>(static_cast<T*>(target) + to) =
      *reinterpret_cast<const Vector<T, V>*>(static_cast<const T*>(source) + from);
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

// Unit `unit` of a row that is rotated: its pairs come first, then what is copied.
template <class T, int V>
__device__ void rotate_unit(const Job& job, int32_t unit, int64_t position, const void* source,
                            int64_t from, void* target, int64_t to) {
  const Params& p = job.given;
  if (unit >= job.pair_units) {
    const int64_t d = p.rotary_dim + int64_t{unit - job.pair_units} * V;
    copy<T, V>(source, from + d, target, to + d);
    return;
  }
  // V pairs: features d.. with d + half.., or 2 d with 2 d + 1..
  const int64_t d = int64_t{unit} * V, half = p.rotary_dim / 2;
  alignas(16) float cos[V], sin[V];
  read_table<T, V>(p.rotary_cos, position * p.rotary_cos.stride[0] + d, cos);
  read_table<T, V>(p.rotary_sin, position * p.rotary_sin.stride[0] + d, sin);
  const int64_t first = p.rotary_interleaved ? 2 * d : d;
  const int64_t second = p.rotary_interleaved ? 2 * d + V : d + half;
  alignas(16) T x[2 * V];
  load<T, V>(source, from + first, x);
  load<T, V>(source, from + second, x + V);
  if (p.rotary_interleaved) {
#pragma unroll
    for (int i = 0; i < V; ++i) rotate(x[2 * i], x[2 * i + 1], cos[i], sin[i]);
  } else {
#pragma unroll
    for (int i = 0; i < V; ++i) rotate(x[i], x[V + i], cos[i], sin[i]);
  }
  store<T, V>(target, to + first, x);
  store<T, V>(target, to + second, x + V);
}

__device__ int64_t offset_of(const Job& job, const Token& token, int32_t row, int64_t head,
                             const flashonnx_tensor& tensor) {
  return head * tensor.stride[1] + (job.ragged ? row : token.i) * tensor.stride[2] +
         (job.ragged ? 0 : token.b * tensor.stride[0]);
}

// One unit of the rows of a token: first Q's, if they are rotated, then K's and V's.
template <class T, int V>
__device__ void process_unit(const Job& job, const Token& token, int32_t row, int32_t unit) {
  const Params& p = job.given;
  const int64_t position = job.rotary ? rotary_position(p, token.b, token.i, token.tokens, row) : 0;
  const int32_t queries = job.rotary ? static_cast<int32_t>(p.q_heads) * job.head_units : 0;
  if (unit < queries) {
    const int32_t head = unit / job.head_units;
    rotate_unit<T, V>(job, unit % job.head_units, position, p.q.data,
                      offset_of(job, token, row, head, p.q), job.problem.q.data,
                      offset_of(job, token, row, head, job.problem.q));
    return;
  }
  unit -= queries;
  const int64_t slot = cached_keys(p, token.b) + token.i;
  const int32_t keys = static_cast<int32_t>(p.kv_heads) * job.key_units;
  const bool is_key = unit < keys;
  if (!is_key) unit -= keys;
  const int32_t row_units = is_key ? job.key_units : job.value_units;
  const int32_t head = unit / row_units, part = unit % row_units;
  const flashonnx_tensor& source = is_key ? p.k : p.v;
  const flashonnx_tensor& target = is_key ? job.problem.k : job.problem.v;
  const int64_t to = place_of_key(p, target, token.b, head, slot);
  if (to < 0) {
    if (job.log && is_key && head == 0 && part == 0 && slot < p.cache_capacity)
      printf("flashonnx: sequence %d: slot %lld has no page: its key is dropped\n", token.b,
             static_cast<long long>(slot));
    return;
  }
  const int64_t from = offset_of(job, token, row, head, source);
  if (is_key && job.rotary) {
    rotate_unit<T, V>(job, part, position, source.data, from, target.data, to);
  } else {
    const int64_t d = int64_t{part} * V;
    copy<T, V>(source.data, from + d, target.data, to + d);
  }
}

// A row of O that no sequence has, or that is too far into its own.
__device__ void clear_row(const Job& job, int32_t row) {
  const Params& p = job.given;
  const int64_t elements = p.q_heads * p.value_dim;
  const int64_t first = int64_t{blockIdx.y} * kThreads + threadIdx.x;
  for (int64_t i = first; i < elements; i += int64_t{gridDim.y} * kThreads) {
    const int64_t at = i / p.value_dim * p.o.stride[1] + row * p.o.stride[2] + i % p.value_dim;
    if (p.o.dtype == FLASHONNX_FLOAT32) {
      static_cast<float*>(p.o.data)[at] = 0;
    } else {
      static_cast<uint16_t*>(p.o.data)[at] = 0;
    }
  }
  if (p.lse.dtype == FLASHONNX_NONE) return;
  for (int64_t head = first; head < p.q_heads; head += int64_t{gridDim.y} * kThreads) {
    static_cast<float*>(p.lse.data)[head * p.lse.stride[1] + row * p.lse.stride[2]] = -INFINITY;
  }
}

template <class T, int V>
__global__ void __launch_bounds__(kThreads) append_kernel(const __grid_constant__ Job job) {
  const int64_t block = blockIdx.x;
  if (block == job.tokens) {
    if (blockIdx.y == 0) count(job);
    return;
  }
  const auto row = static_cast<int32_t>(block);
  const Token token = find_token(job, row);
  const bool inside = token.b >= 0;
  if (job.ragged && (!inside || token.i >= job.given.q_length)) clear_row(job, row);
  if (!inside) return;
  const int64_t step = int64_t{gridDim.y} * kThreads;
  for (int64_t unit = int64_t{blockIdx.y} * kThreads + threadIdx.x; unit < job.units; unit += step)
    process_unit<T, V>(job, token, row, static_cast<int32_t>(unit));
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

template <class T, int V>
flashonnx_status launch(Job job, cudaStream_t stream) {
  const Params& p = job.given;
  const auto units = [](int64_t elements) { return static_cast<int32_t>(elements / V); };
  const int64_t rotary = job.rotary ? p.rotary_dim : 0;
  job.pair_units = units(rotary / 2);
  job.head_units = job.key_units = job.pair_units + units(p.head_dim - rotary);
  job.value_units = units(p.value_dim);
  const int64_t heads = (job.rotary ? p.q_heads : 0) + (job.append ? p.kv_heads : 0);
  const int64_t all = heads * job.head_units + (job.append ? p.kv_heads * job.value_units : 0);
  constexpr int64_t kMaxBlocks = 1024;
  job.units = static_cast<int32_t>(all);
  cudaLaunchConfig_t config = {};
  const int64_t blocks = std::clamp<int64_t>((all + kThreads - 1) / kThreads, 1, kMaxBlocks);
  config.gridDim = dim3(static_cast<unsigned>(job.tokens) + 1, static_cast<unsigned>(blocks));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  return cuda_status(cudaLaunchKernelEx(&config, append_kernel<T, V>, job), "cache append kernel");
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

// Brings together the outputs of splits, each already divided by its own sum: Y = sum w_s Y_s with
// w_s = sum_s exp(maximum_s - maximum) / sum.
//
// Grid: linear in x, a warp for each query of each head. Block: 4 warps, no shared memory.
#include <cuda_runtime.h>

#include <cmath>

#include "flashonnx/attention.h"
#include "kernels/common/cuda.h"
#include "kernels/common/gather.cuh"
#include "kernels/simt/device.cuh"
#include "kernels/simt/launch.h"

namespace flashonnx::simt {
namespace {

constexpr int kWarps = 4;

struct Combine {
  Problem problem;
  View partial_o, partial_maximum;
  const float* partial_sums;  // as the maxima
  int64_t o_split, maximum_split;
  int32_t splits;  // at most 32: one a lane
  int32_t value_dtype;
  int64_t rows;  // of a head: queries, or all tokens of a ragged batch
};

template <class T>
__device__ __forceinline__ float mean_of_feature(const Problem& p, const Place& place, int length,
                                                 int feature) {
  const T* v = static_cast<const T*>(p.v.data) + place.batch * p.v.batch +
               place.kv_head * p.v.head + feature;
  float sum = 0.f;
#pragma unroll 4
  for (int key = 0; key < length; ++key) sum += to_float(v[key * p.v.row]);
  return length > 0 ? sum / static_cast<float>(length) : 0.f;
}

__device__ __forceinline__ float empty_row(const Problem& p, const Place& place, int value_dtype,
                                           int feature) {
  if (!p.empty_row_mean || p.sinks) return 0.f;
  const int length = key_length_of(p, place.batch);
  if (value_dtype == FLASHONNX_FLOAT32) return mean_of_feature<float>(p, place, length, feature);
  if (value_dtype == FLASHONNX_FLOAT16) return mean_of_feature<__half>(p, place, length, feature);
  return mean_of_feature<__nv_bfloat16>(p, place, length, feature);
}

__device__ __forceinline__ void store(const Problem& p, int64_t at, float x) {
  if (p.output_dtype == FLASHONNX_FLOAT32) static_cast<float*>(p.o.data)[at] = x;
  if (p.output_dtype == FLASHONNX_FLOAT16)
    static_cast<__half*>(p.o.data)[at] = from_float<__half>(x);
  if (p.output_dtype == FLASHONNX_BFLOAT16)
    static_cast<__nv_bfloat16*>(p.o.data)[at] = from_float<__nv_bfloat16>(x);
}

template <class Op>
__device__ __forceinline__ float reduce_warp(float x, Op op) {
  for (int distance = 16; distance > 0; distance /= 2)
    x = op(x, __shfl_xor_sync(0xffffffffu, x, distance));
  return x;
}

// Whether a token of a ragged batch has an output. All threads of a warp call this.
__device__ __forceinline__ bool has_sequence(const Problem& p, int token) {
  const int32_t* first = p.ragged.queries;
  const int32_t sequence =
      find_last(p.ragged.sequences, token, [&](int32_t i) { return first[i]; });
  const int32_t query = token - first[sequence];
  return query >= 0 && query < at_most(first[sequence + 1] - first[sequence], p.q_length);
}

__global__ void __launch_bounds__(32 * kWarps) combine_kernel(const __grid_constant__ Combine c) {
  const Problem& p = c.problem;
  const int lane = threadIdx.x % 32;
  const int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (row >= p.batch_heads * c.rows) return;
  const int64_t batch_head = row / c.rows;
  const int query = static_cast<int>(row % c.rows), head = static_cast<int>(batch_head % p.q_heads);
  if (p.ragged.queries && !has_sequence(p, query)) return;
  const Place place = {static_cast<int>(batch_head / p.q_heads), head, head / p.group, query, 0};

  const int64_t at = lane * c.maximum_split + place.batch * c.partial_maximum.batch +
                     head * c.partial_maximum.head + query * c.partial_maximum.row;
  const float* o = static_cast<const float*>(c.partial_o.data) + place.batch * c.partial_o.batch +
                   head * c.partial_o.head + query * c.partial_o.row;
  const bool split = lane < c.splits;
  const float mine = split ? static_cast<const float*>(c.partial_maximum.data)[at] : -INFINITY;
  const float maximum = reduce_warp(mine, [](float a, float b) { return fmaxf(a, b); });
  const float base = maximum == -INFINITY ? 0.f : maximum;  // as in softmax.cuh
  float weight = split ? c.partial_sums[at] * expf(mine - base) : 0.f;
  const float sum = reduce_warp(weight, [](float a, float b) { return a + b; });
  if (lane == 0 && p.lse.data) {
    static_cast<float*>(
        p.lse.data)[place.batch * p.lse.batch + head * p.lse.head + query * p.lse.row] =
        sum == 0.f ? -INFINITY : maximum + logf(sum);
  }
  float factor = 1.f / sum;
  if (p.sinks) {
    const float sink = p.sinks[head * p.sinks_stride], top = fmaxf(maximum, sink);
    factor = expf(maximum - top);
    factor /= sum * factor + expf(sink - top);
  }
  weight *= factor;
  for (int start = 0; start < p.value_dim;
       start += 32) {  // all lanes, so that they can exchange weights
    const int feature = min(start + lane, p.value_dim - 1);
    float output = 0.f;
    for (int s = 0; s < c.splits; ++s) {
      output = fmaf(__shfl_sync(0xffffffffu, weight, s), o[s * c.o_split + feature], output);
    }
    if (sum == 0.f) output = empty_row(p, place, c.value_dtype, feature);
    if (start + lane < p.value_dim) {
      store(p, place.batch * p.o.batch + head * p.o.head + query * p.o.row + feature, output);
    }
  }
}

}  // namespace

flashonnx_status launch_combine(const Problem& problem, const Problem& partial, int32_t value_dtype,
                                cudaStream_t stream) {
  const int64_t rows = problem.ragged.queries ? problem.ragged.tokens : problem.q_length;
  const Combine combine = {problem,        partial.o,       partial.lse,
                           partial.sums,   partial.o_split, partial.lse_split,
                           partial.splits, value_dtype,     rows};
  const int64_t blocks = (problem.batch_heads * rows + kWarps - 1) / kWarps;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(32 * kWarps);
  config.stream = stream;
  return cuda_status(cudaLaunchKernelEx(&config, combine_kernel, combine), "simt combine kernel");
}

}  // namespace flashonnx::simt

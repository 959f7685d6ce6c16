// Brings together the partitions that the workspace holds.
//
// Grid: linear in x, a warp for each packed row. Block: 4 warps, no shared memory.
#include <cuda_runtime.h>

#include "kernels/common/carveout.h"
#include "kernels/decode/config.h"
#include "kernels/decode/deal.cuh"
#include "kernels/decode/finish.cuh"
#include "kernels/decode/launch.h"

namespace flashonnx::decode {
namespace {

constexpr int kWarps = 4;

// The whole of `count` parts; part(i) gives {maximum, sum} as float2.
template <class Part>
__device__ __forceinline__ Sums total_of(int count, Part part) {
  Sums total;
#pragma unroll 4
  for (int i = 0; i < count; ++i) total.maximum = fmaxf(total.maximum, part(i).x);
#pragma unroll 4
  for (int i = 0; i < count; ++i) {
    const float2 x = part(i);
    total.sum = fmaf(exp2_approximate(x.x - total.maximum), x.y, total.sum);
  }
  return total;
}

// Likewise four features: output(i) gives them as float4.
template <class Part, class Output>
__device__ __forceinline__ float4 outputs_of(int count, float maximum, Part part, Output output) {
  float4 all = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 4
  for (int i = 0; i < count; ++i) {
    const float weight = exp2_approximate(part(i).x - maximum);
    const float4 x = output(i);
    all.x = fmaf(weight, x.x, all.x), all.y = fmaf(weight, x.y, all.y);
    all.z = fmaf(weight, x.z, all.z), all.w = fmaf(weight, x.w, all.w);
  }
  return all;
}

template <class T>
__global__ void __launch_bounds__(32 * kWarps)
    combine(const __grid_constant__ Problem p, const __grid_constant__ Decode d) {
  const int64_t packed = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (packed >= d.all_rows) return;
  // As in work_of: rows of a tile, tiles of a key head, key heads of a batch entry.
  const uint32_t tile = static_cast<uint32_t>(packed / d.rows);
  const uint32_t head = d.row_tiles.quotient(tile), batch = d.kv_heads.quotient(head);
  wait_for_predecessor();
  const int queries = queries_of(p, d, batch);
  const int first = (tile - head * d.row_tiles.divisor) * d.rows;
  const Rows rows = {first, min(rows_from(p, d, queries, first), d.rows), static_cast<int>(batch),
                     static_cast<int>(head - batch * d.kv_heads.divisor)};
  const int row = static_cast<int>(packed % d.rows);
  if (row >= rows.count) return;

  const int partitions = d.partitions.divisor;
  const auto part = [&](int i) { return d.partial_sums[i * d.all_rows + packed]; };
  const Sums sums = total_of(partitions, part);
  const int token = d.first_queries ? d.first_queries[batch] : 0;
  for (int feature = threadIdx.x % 32 * 4; feature < d.partial_dim; feature += 128) {
    const float4 output = outputs_of(partitions, sums.maximum, part, [&](int i) {
      return *reinterpret_cast<const float4*>(d.partial_outputs +
                                              (i * d.all_rows + packed) * d.partial_dim + feature);
    });
    store_output<T>(p, d, rows, token, row, feature, sums, output);
  }
}

// The whole of `count` parts by a warp: a lane has asked for its first one, `mine`, already.
template <class Part>
__device__ __forceinline__ Sums total_by_warp(int count, float2 mine, Part part) {
  const int next = static_cast<int>(threadIdx.x % 32) + 32;
  Sums total;
  total.maximum = mine.x;
  for (int i = next; i < count; i += 32) total.maximum = fmaxf(total.maximum, part(i).x);
  total.maximum = reduce_lanes<1>(total.maximum, [](float a, float b) { return fmaxf(a, b); });
  total.sum = exp2_approximate(mine.x - total.maximum) * mine.y;
  for (int i = next; i < count; i += 32) {
    const float2 x = part(i);
    total.sum = fmaf(exp2_approximate(x.x - total.maximum), x.y, total.sum);
  }
  total.sum = reduce_lanes<1>(total.sum, [](float a, float b) { return a + b; });
  return total;
}

// Likewise the parts of equal shares.
//
// Grid: units, rows. Block: 4 warps, which take turns in the parts of a row.
__global__ void __launch_bounds__(32 * kWarps)
    combine_shares(const __grid_constant__ Problem p, const __grid_constant__ Decode d) {
  constexpr int kRows = Tiling128::kRows;
  constexpr int kAhead = 4;  // parts that a warp asks for at once
  __shared__ float4 of_warp[kWarps][32];
  let_dependents_launch();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = blockIdx.y;
  const int batch = d.kv_heads.quotient(blockIdx.x);
  const int kv_head = blockIdx.x - batch * d.kv_heads.divisor;
  if (d.first_queries) wait_for_predecessor();
  const Lengths lengths(p, d, kRows);
  const Rows rows = lengths.unit(p, d, batch, kv_head).rows;
  const Parts parts = parts_of(d, lengths, batch, kv_head);
  wait_for_predecessor();
  if (row >= rows.count) return;
  const int token = d.first_queries ? d.first_queries[batch] : 0;
  const int64_t at = part_at(d, parts.first, batch, kv_head);
  const auto sums_of = [&](int i) { return d.partial_sums[at + int64_t{i} * d.rows + row]; };
  Sums sums;
  const float2 mine = lane < parts.count ? sums_of(lane) : float2{-FLT_MAX, 0.f};
#pragma unroll 1
  for (int first = 0; first < d.partial_dim; first += 128) {
    const auto output_of = [&](int i) {
      return reinterpret_cast<const float4*>(
          d.partial_outputs +
          (at + int64_t{i} * d.rows) *
              d.partial_dim)[(first / 32 + lane / 8) * d.rows * 8 + row * 8 + lane % 8];
    };
    const bool inside = first + lane / 8 * 32 < d.partial_dim;
    float4 x[kAhead];
    float maximum[kAhead];
    const auto ask = [&](int i) {
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const bool there = i + j * kWarps < parts.count && inside;
        x[j] = there ? output_of(i + j * kWarps) : float4{0.f, 0.f, 0.f, 0.f};
        maximum[j] = there ? sums_of(i + j * kWarps).x : -FLT_MAX;
      }
    };
    ask(warp);
    if (first == 0) sums = total_by_warp(parts.count, mine, sums_of);
    float4 all = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 1
    for (int i = warp; i < parts.count; i += kAhead * kWarps) {
      if (i != warp) ask(i);
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const float weight = exp2_approximate(maximum[j] - sums.maximum);
        all.x = fmaf(weight, x[j].x, all.x), all.y = fmaf(weight, x[j].y, all.y);
        all.z = fmaf(weight, x[j].z, all.z), all.w = fmaf(weight, x[j].w, all.w);
      }
    }
    of_warp[warp][lane] = all;
    __syncthreads();
    // Four features 8 apart become neighbours: thread t has feature `first` + t.
    const int t = threadIdx.x;
    const float* const from =
        reinterpret_cast<const float*>(of_warp) + (t / 32 * 8 + t % 8) * 4 + t % 32 / 8;
    float output = 0.f;
#pragma unroll
    for (int j = 0; j < kWarps; ++j) output += from[j * 128];
    const OutputRow out(p, d, rows, token, row, sums, first + t == 0);
    if (first + t < p.value_dim) store_element(p, out.at + first + t, output * out.scale);
    __syncthreads();
  }
}

flashonnx_status launch_combining(void (*kernel)(Problem, Decode), dim3 grid,
                                  const Problem& problem, const Decode& decode, bool overlap,
                                  cudaStream_t stream) {
  cudaLaunchAttribute attributes[] = {overlap_attribute(), shared_memory_attribute()};
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(32 * kWarps);
  config.stream = stream;
  bool hopper = false;
  FLASHONNX_RETURN_IF_ERROR(has_hopper_code(reinterpret_cast<const void*>(kernel), &hopper));
  if (hopper && overlap) config.attrs = attributes, config.numAttrs = 2;
  return cuda_status(cudaLaunchKernelEx(&config, kernel, problem, decode), "decode combine kernel");
}

}  // namespace

flashonnx_status launch_combine_shares(const Problem& problem, const Decode& decode, int64_t units,
                                       bool overlap, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(units), static_cast<unsigned>(decode.rows));
  return launch_combining(combine_shares, grid, problem, decode, overlap, stream);
}

flashonnx_status launch_combine(const Problem& problem, const Decode& decode, bool bfloat16,
                                bool overlap, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((decode.all_rows + kWarps - 1) / kWarps));
  return launch_combining(bfloat16 ? combine<__nv_bfloat16> : combine<__half>, grid, problem,
                          decode, overlap, stream);
}

}  // namespace flashonnx::decode

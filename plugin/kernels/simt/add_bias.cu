// Sums of projections and their biases; memory-bound, 16 bytes a thread where alignment allows.
//
// Grid: x strides over the elements, y is the projection. Block: 256 threads, no shared memory.
#include <cuda_runtime.h>

#include "kernels/common/arithmetic.cuh"
#include "kernels/common/cuda.h"
#include "kernels/projection.h"

namespace flashonnx {
namespace {

constexpr int kAddThreads = 256;
constexpr int64_t kMostAddBlocks = 1 << 14;  // many times what any device holds at once

struct Sum {
  const void* from;
  const void* bias;
  void* to;
  int64_t batch, head, row;               // strides of `from`, in elements
  int64_t bias_head;                      // as well, of `bias`
  int64_t heads, rows, row_units, units;  // of the size of an access; units: in all
};

struct SumsOfProjections {
  Sum of[3];
};

template <class T>
__device__ __forceinline__ T add(T x, T y) {
  return T(to_float(x) + to_float(y));
}

// Index: 32 bits where they suffice, for the divisions' sake.
template <class T, int kElements, class Index>
__global__ void __launch_bounds__(kAddThreads)
    add_bias_kernel(const __grid_constant__ SumsOfProjections sums) {
  struct alignas(kElements * sizeof(T)) Unit {
    T x[kElements];
  };
  const Sum& sum = sums.of[blockIdx.y];
  const Index row_units = static_cast<Index>(sum.row_units), units = static_cast<Index>(sum.units);
  const Index rows = static_cast<Index>(sum.rows), heads = static_cast<Index>(sum.heads);
  for (Index i = static_cast<Index>(blockIdx.x) * kAddThreads + threadIdx.x; i < units;
       i += static_cast<Index>(gridDim.x) * kAddThreads) {
    const Index unit = i % row_units, head = i / row_units % heads;
    const Index token = i / row_units / heads;
    const T* const from = static_cast<const T*>(sum.from) + token / rows * sum.batch +
                          token % rows * sum.row + head * sum.head;
    const T* const bias = static_cast<const T*>(sum.bias) + head * sum.bias_head;
    Unit x = reinterpret_cast<const Unit*>(from)[unit];
    const Unit y = reinterpret_cast<const Unit*>(bias)[unit];
#pragma unroll
    for (int e = 0; e < kElements; ++e) x.x[e] = add(x.x[e], y.x[e]);
    static_cast<Unit*>(sum.to)[i] = x;
  }
}

template <class T, int kElements>
flashonnx_status launch_sums(SumsOfProjections sums, cudaStream_t stream) {
  int64_t most = 0;
  for (Sum& sum : sums.of) {
    sum.row_units /= kElements, sum.units /= kElements;
    most = sum.units > most ? sum.units : most;
  }
  if (most == 0) return ok();
  const int64_t blocks = (most + kAddThreads - 1) / kAddThreads;
  cudaLaunchConfig_t config = {};
  config.gridDim =
      dim3(static_cast<unsigned>(blocks < kMostAddBlocks ? blocks : kMostAddBlocks), 3);
  config.blockDim = dim3(kAddThreads);
  config.stream = stream;
  constexpr int64_t kNarrow = int64_t{1} << 31;  // so that adding a grid's stride stays below 2^32
  const auto kernel = most < kNarrow ? add_bias_kernel<T, kElements, uint32_t>
                                     : add_bias_kernel<T, kElements, uint64_t>;
  return cuda_status(cudaLaunchKernelEx(&config, kernel, sums), "bias kernel");
}

}  // namespace

flashonnx_status add_biases_cuda(const BiasedProjection (&projections)[3], void* stream) {
  SumsOfProjections sums = {};
  int32_t dtype = FLASHONNX_NONE;
  uint64_t bits = 0;  // its trailing zeros: how everything is aligned
  for (int i = 0; i < 3; ++i) {
    const auto& [from, bias, to, batch, heads, rows, dim] = projections[i];
    const int64_t units = batch * heads * rows * dim;
    if (units == 0) continue;
    dtype = from.dtype;
    sums.of[i] = {from.data,      bias.data,      to.data, from.stride[0], from.stride[1],
                  from.stride[2], bias.stride[1], heads,   rows,           dim,
                  units};
    const int64_t size = dtype == FLASHONNX_FLOAT32 ? 4 : 2, sizes[] = {batch, heads, rows};
    bits |= reinterpret_cast<uintptr_t>(from.data) | reinterpret_cast<uintptr_t>(bias.data) |
            static_cast<uint64_t>(dim * size);
    for (int j = 0; j < 3; ++j)
      if (sizes[j] > 1) bits |= static_cast<uint64_t>(from.stride[j] * size);
    if (heads > 1) bits |= static_cast<uint64_t>(bias.stride[1] * size);
  }
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const bool vectors = bits % 16 == 0;
  switch (dtype) {
    case FLASHONNX_FLOAT32:
      return vectors ? launch_sums<float, 4>(sums, cuda_stream)
                     : launch_sums<float, 1>(sums, cuda_stream);
    case FLASHONNX_FLOAT16:
      return vectors ? launch_sums<__half, 8>(sums, cuda_stream)
                     : launch_sums<__half, 1>(sums, cuda_stream);
    case FLASHONNX_BFLOAT16:
      return vectors ? launch_sums<__nv_bfloat16, 8>(sums, cuda_stream)
                     : launch_sums<__nv_bfloat16, 1>(sums, cuda_stream);
    default:
      return ok();  // there is nothing to add to
  }
}

}  // namespace flashonnx

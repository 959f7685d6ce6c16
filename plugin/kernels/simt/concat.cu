// Copies rows of features from strided views into a strided view; memory-bound, 16 bytes a thread
// where alignment allows.
//
// Grid: linear in x, at most kMaxBlocks blocks that stride over the elements. Block: 256 threads,
// no shared memory.
#include "kernels/simt/concat.h"

#include <cuda_runtime.h>

#include "kernels/common/cuda.h"

namespace flashonnx {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 1 << 16;  // many times what any device holds at once

struct Copy {
  const char* source;
  char* target;
  int64_t source_stride[3], target_stride[3];  // batch, head, row; in bytes
  int64_t heads, rows, row_units, units;       // of the size of the access; units: in all
};

// Index: 32 bits where they suffice, for the divisions' sake.
template <class Unit, class Index>
__global__ void __launch_bounds__(kThreads) copy_rows_kernel(const __grid_constant__ Copy copy) {
  const Index row_units = static_cast<Index>(copy.row_units), rows = static_cast<Index>(copy.rows);
  const Index heads = static_cast<Index>(copy.heads), units = static_cast<Index>(copy.units);
  for (Index i = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x; i < units;
       i += static_cast<Index>(gridDim.x) * kThreads) {
    const Index unit = i % row_units, all_rows = i / row_units;
    const int64_t row = all_rows % rows, head = all_rows / rows % heads;
    const int64_t batch = all_rows / rows / heads;
    const char* source = copy.source + batch * copy.source_stride[0] +
                         head * copy.source_stride[1] + row * copy.source_stride[2];
    char* target = copy.target + batch * copy.target_stride[0] + head * copy.target_stride[1] +
                   row * copy.target_stride[2];
    reinterpret_cast<Unit*>(target)[unit] = reinterpret_cast<const Unit*>(source)[unit];
  }
}

template <class Unit>
flashonnx_status launch_copy(Copy copy, int64_t row_bytes, int64_t total_rows,
                             cudaStream_t stream) {
  copy.row_units = row_bytes / static_cast<int64_t>(sizeof(Unit));
  copy.units = copy.row_units * total_rows;
  const int64_t blocks = (copy.units + kThreads - 1) / kThreads;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks < kMaxBlocks ? blocks : kMaxBlocks));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  constexpr int64_t kNarrow = int64_t{1} << 31;  // so that adding a grid's stride stays below 2^32
  const auto kernel =
      copy.units < kNarrow ? copy_rows_kernel<Unit, uint32_t> : copy_rows_kernel<Unit, uint64_t>;
  return cuda_status(cudaLaunchKernelEx(&config, kernel, copy), "present copy kernel");
}

// Copies (batch, heads, rows, dim) from `source` to `target`, which starts `target_row` rows into
// its tensor.
flashonnx_status copy_rows(const flashonnx_tensor& source, const flashonnx_tensor& target,
                           int64_t target_row, int64_t batch, int64_t heads, int64_t rows,
                           int64_t dim, int64_t element_size, cudaStream_t stream) {
  if (batch == 0 || heads == 0 || rows == 0 || dim == 0) return ok();
  Copy copy = {};
  copy.source = static_cast<const char*>(source.data);
  copy.target = static_cast<char*>(target.data) + target_row * target.stride[2] * element_size;
  copy.heads = heads;
  copy.rows = rows;
  const int64_t row_bytes = dim * element_size, sizes[3] = {batch, heads, rows};
  uint64_t bits =
      reinterpret_cast<uintptr_t>(copy.source) | reinterpret_cast<uintptr_t>(copy.target) |
      static_cast<uint64_t>(row_bytes);  // its trailing zeros: how everything is aligned
  for (int i = 0; i < 3; ++i) {
    if (sizes[i] == 1) continue;  // never used
    copy.source_stride[i] = source.stride[i] * element_size;
    copy.target_stride[i] = target.stride[i] * element_size;
    bits |= static_cast<uint64_t>(copy.source_stride[i] | copy.target_stride[i]);
  }
  const int64_t total_rows = batch * heads * rows;
  if (bits % 16 == 0) return launch_copy<uint4>(copy, row_bytes, total_rows, stream);
  if (bits % 4 == 0) return launch_copy<uint32_t>(copy, row_bytes, total_rows, stream);
  if (bits % 2 == 0) return launch_copy<uint16_t>(copy, row_bytes, total_rows, stream);
  return launch_copy<uint8_t>(copy, row_bytes, total_rows, stream);
}

}  // namespace

flashonnx_status concat_cuda(const flashonnx_tensor& present, const flashonnx_tensor& past,
                             const flashonnx_tensor& fresh, int64_t batch, int64_t heads,
                             int64_t past_len, int64_t new_len, int64_t dim, int64_t element_size,
                             bool copy_past, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (copy_past) {
    FLASHONNX_RETURN_IF_ERROR(
        copy_rows(past, present, 0, batch, heads, past_len, dim, element_size, cuda_stream));
  }
  return copy_rows(fresh, present, past_len, batch, heads, new_len, dim, element_size, cuda_stream);
}

}  // namespace flashonnx

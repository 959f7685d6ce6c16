#include "kernels/sm90/tensor_map.h"

#include <cuda_runtime_api.h>

#include <algorithm>

#include "kernels/common/cuda.h"
#include "kernels/common/problem.h"

namespace flashonnx::sm90 {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// The driver's function, which the library does not link to: it also loads without a driver.
flashonnx_status encoder(Encode* encode) {
  static const auto found = [] {
    struct {
      void* function = nullptr;
      cudaError_t error;
    } result;
    cudaDriverEntryPointQueryResult query;
#if CUDART_VERSION >= 12050
    result.error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &result.function,
                                                    12000, cudaEnableDefault, &query);
#else
    result.error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &result.function,
                                           cudaEnableDefault, &query);
#endif
    return result;
  }();
  *encode = reinterpret_cast<Encode>(found.function);
  if (found.error == cudaSuccess && found.function == nullptr) {
    return make_status(FLASHONNX_RUNTIME_ERROR, "sm90: the driver has no cuTensorMapEncodeTiled");
  }
  return cuda_status(found.error, "sm90: cuTensorMapEncodeTiled of the driver");
}

CUtensorMapDataType type_of(const flashonnx_tensor& tensor) {
  return tensor.dtype == FLASHONNX_FLOAT16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                           : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

flashonnx_status encoded(CUresult result) {
  if (result == CUDA_SUCCESS) return ok();
  return make_status(FLASHONNX_RUNTIME_ERROR, "sm90: cuTensorMapEncodeTiled: CUDA error %d",
                     static_cast<int>(result));
}

flashonnx_status encode_map(const flashonnx_tensor& tensor, CUtensorMapDataType type, int64_t batch,
                            int64_t heads, int64_t rows, int64_t dim, int box_rows,
                            int box_features, CUtensorMap* map) {
  Encode encode = nullptr;
  FLASHONNX_RETURN_IF_ERROR(encoder(&encode));
  const int64_t element = size_of(tensor.dtype);
  // Nothing may be 0, and a stride that is never used still has to be one.
  const auto size = [](int64_t x) { return static_cast<cuuint64_t>(std::max<int64_t>(x, 1)); };
  const auto stride = [element](int64_t count, int64_t elements) {
    return static_cast<cuuint64_t>(count > 1 ? elements * element : 16);
  };
  const cuuint64_t sizes[] = {size(dim), size(rows), size(heads), size(batch)};
  const cuuint64_t strides[] = {stride(rows, tensor.stride[2]), stride(heads, tensor.stride[1]),
                                stride(batch, tensor.stride[0])};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(box_features),
                            static_cast<cuuint32_t>(box_rows), 1, 1};
  const cuuint32_t steps[] = {1, 1, 1, 1};
  const CUresult result =
      encode(map, type, 4, tensor.data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             box_features * element == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return encoded(result);
}

}  // namespace

bool strides_fit(const flashonnx_tensor& tensor, int64_t batch, int64_t heads, int64_t rows) {
  const int64_t sizes[] = {batch, heads, rows};
  for (int i = 0; i < 3; ++i) {
    const int64_t bytes = tensor.stride[i] * 2;
    if (sizes[i] > 1 && (bytes <= 0 || bytes % 16 != 0 || bytes >= int64_t{1} << 40)) return false;
  }
  return true;
}

bool mask_strides_fit(const flashonnx_tensor& mask, int64_t batch, int64_t heads, int64_t rows) {
  const int64_t sizes[] = {batch, heads, rows};
  const int64_t element = size_of(mask.dtype);
  if (mask.stride[3] != 1) return false;
  for (int i = 0; i < 3; ++i) {
    const int64_t bytes = mask.stride[i] * element;
    if (sizes[i] > 1 && (bytes < 0 || bytes % 16 != 0 || bytes >= int64_t{1} << 40)) return false;
  }
  return mask.stride[2] != 0;
}

flashonnx_status encode_tensor_map(const flashonnx_tensor& tensor, int64_t batch, int64_t heads,
                                   int64_t rows, int64_t dim, int box_rows, int box_features,
                                   CUtensorMap* map) {
  return encode_map(tensor, type_of(tensor), batch, heads, rows, dim, box_rows, box_features, map);
}

flashonnx_status encode_whole_rows(const flashonnx_tensor& tensor, int64_t heads, int64_t rows,
                                   int64_t dim, int box_rows, int box_features, CUtensorMap* map) {
  Encode encode = nullptr;
  FLASHONNX_RETURN_IF_ERROR(encoder(&encode));
  const auto size = [](int64_t x) { return static_cast<cuuint64_t>(x); };
  // Features, rows of a group, boxes of features, groups, heads.
  const cuuint64_t row = size(tensor.stride[2] * 2), head = size(tensor.stride[1] * 2);
  const cuuint64_t sizes[] = {64, 8, size(dim / 64), size(rows / 8), size(heads)};
  const cuuint64_t strides[] = {row, 128, 8 * row, heads > 1 ? head : 16};
  const cuuint32_t box[] = {64, 8, static_cast<cuuint32_t>(box_features / 64),
                            static_cast<cuuint32_t>(box_rows / 8), 1};
  const cuuint32_t steps[] = {1, 1, 1, 1, 1};
  return encoded(encode(map, type_of(tensor), 5, tensor.data, sizes, strides, box, steps,
                        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
}

flashonnx_status encode_mask_map(const Params& params, int box_rows, int box_keys,
                                 CUtensorMap* map) {
  const flashonnx_tensor& mask = params.mask;
  const bool bytes = size_of(mask.dtype) == 1;
  return encode_map(mask, bytes ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16,
                    mask.stride[0] != 0 ? params.batch : 1,
                    mask.stride[1] != 0 ? params.q_heads : 1, params.q_length, params.mask_keys,
                    box_rows, std::min(bytes ? 128 : 64, box_keys), map);
}

}  // namespace flashonnx::sm90

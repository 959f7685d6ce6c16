// Which problems are taken, and the tiling for their head dimensions.
#include "kernels/sm90/launch.h"

#include <algorithm>

#include "kernels/common/problem.h"
#include "kernels/sm90/tensor_map.h"

namespace flashonnx::sm90 {

const char* refusal(const Params& params) {
  if (!strides_fit(params.q, params.batch, params.q_heads, params.q_length) ||
      !strides_fit(params.k, params.batch, params.kv_heads, params.kv_length) ||
      !strides_fit(params.v, params.batch, params.kv_heads, params.kv_length)) {
    return "reads rows, heads and batch entries at multiples of 16 bytes";
  }
  if (params.mask.dtype != FLASHONNX_NONE && params.mask.stride[2] != 0 && params.q_length > 1) {
    if (size_of(params.mask.dtype) != 1 && params.mask.dtype != params.q.dtype)
      return "takes a mask with a row per query as bytes or in Q's type";
    if (!mask_strides_fit(params.mask, params.batch, params.q_heads, params.q_length))
      return "reads a mask's rows at multiples of 16 bytes, keys side by side";
  }
  // Counted in 32 bits, with the blocks of a round added.
  constexpr int64_t kMostTiles = int64_t{1} << 30;
  if ((params.q_length + 63) / 64 >
      kMostTiles / std::max<int64_t>(params.batch * params.q_heads, 1))
    return "deals out up to 2^30 tiles of queries";
  return sm80::refusal(params);
}

flashonnx_status launch(const Params& params, void* workspace, void* stream) {
  const auto aligned = [](const flashonnx_tensor& tensor) {
    return reinterpret_cast<uintptr_t>(tensor.data) % 16 == 0;
  };
  // Selection does not look at data pointers, and without keys there may be none.
  if (!aligned(params.q) || !aligned(params.k) || !aligned(params.v) || params.kv_length == 0 ||
      (!aligned(params.mask) && params.mask.stride[2] != 0))
    return sm80::launch(params, workspace, stream);
  const int64_t dim = std::max(params.head_dim, params.value_dim);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (dim <= 64) return launch_64(params, cuda_stream);
  if (dim <= 96) return launch_96(params, cuda_stream);
  if (dim <= 128) return launch_128(params, cuda_stream);
  if (dim <= 192) return launch_192(params, cuda_stream);
  return launch_256(params, cuda_stream);
}

}  // namespace flashonnx::sm90

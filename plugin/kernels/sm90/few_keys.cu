#include <algorithm>

#include "kernels/common/cuda.h"
#include "kernels/sm90/few_keys.cuh"
#include "kernels/sm90/few_keys.h"
#include "kernels/sm90/tensor_map.h"

namespace flashonnx::sm90 {
namespace {

using General = FewKeys<false>;
using Plain = FewKeys<true>;

template <class T, class C>
flashonnx_status launch_kernel(const Params& params, const Problem& p, const Plan& plan,
                               const FewKeysPlan& few, const Maps& maps, cudaStream_t stream) {
  const auto kernel = few_keys_attention<T, C>;
  // Per device, so not once per process; it only writes a field of the loaded function.
  FLASHONNX_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            C::shared_bytes(C::kMostTiles)));
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>((params.q_length + C::kQueries - 1) / C::kQueries),
                        static_cast<unsigned>(params.q_heads), static_cast<unsigned>(params.batch));
  config.blockDim = dim3(C::kThreads);
  config.dynamicSmemBytes = C::shared_bytes(few.tiles);
  config.stream = stream;
  // As other dense kernels: on streams, not in graphs.
  cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
  FLASHONNX_CUDA_CHECK(cudaStreamIsCapturing(stream, &capturing));
  bool overlaps = false;
  FLASHONNX_RETURN_IF_ERROR(driver_overlaps(&overlaps));
  cudaLaunchAttribute attribute = overlap_attribute();
  config.attrs = &attribute;
  config.numAttrs = overlaps && capturing == cudaStreamCaptureStatusNone ? 1 : 0;
  return cuda_status(cudaLaunchKernelEx(&config, kernel, few, maps, p, plan),
                     "sm90 attention kernel of few keys");
}

template <class C>
flashonnx_status launch_tiling(const Params& params, const Problem& p, const Plan& plan,
                               cudaStream_t stream) {
  Maps maps;
  FLASHONNX_RETURN_IF_ERROR(encode_tensor_map(params.q, params.batch, params.q_heads,
                                              params.q_length, params.head_dim, C::kQueries,
                                              C::kBox, &maps.q));
  FLASHONNX_RETURN_IF_ERROR(encode_tensor_map(params.k, params.batch, params.kv_heads,
                                              params.kv_length, params.head_dim, C::kBoxKeys,
                                              C::kBox, &maps.k));
  FLASHONNX_RETURN_IF_ERROR(encode_tensor_map(params.v, params.batch, params.kv_heads,
                                              params.kv_length, params.value_dim, C::kBoxKeys,
                                              C::kBox, &maps.v));
  if (plan.o_vectors) {  // a warp's rows
    FLASHONNX_RETURN_IF_ERROR(encode_tensor_map(params.o, params.batch, params.q_heads,
                                                params.q_length, params.value_dim, 16, C::kBox,
                                                &maps.o));
  }
  FewKeysPlan few = {};
  few.key_length = p.key_length;
  few.tiles = C::kPlain ? C::kMostTiles : (p.key_length + C::kKeys - 1) / C::kKeys;
  few.longest_last = plan.longest_last;
  few.group = plan.group;
  few.factor = plan.factor;
  return params.q.dtype == FLASHONNX_BFLOAT16
             ? launch_kernel<__nv_bfloat16, C>(params, p, plan, few, maps, stream)
             : launch_kernel<__half, C>(params, p, plan, few, maps, stream);
}

// Without what the kernel of plain problems leaves out.
bool is_plain(const Problem& p, const Plan& plan) {
  return p.key_length <= Plain::kMostTiles * Plain::kKeys && plan.o_vectors && !p.mask.data &&
         !p.lse.data && !p.key_lengths && !p.sinks && !p.q_bias.data && !p.v_bias.data &&
         p.left < 0 && p.right < 0 && !p.empty_row_mean;
}

}  // namespace

bool has_few_keys(const Params& params) {
  if (params.head_dim > General::kDim || params.value_dim > General::kDim) return false;
  // Rows without keys, and rows that are computed again, would need the projections' biases too.
  if (params.q_bias.dtype != FLASHONNX_NONE &&
      (params.is_causal || params.window_left >= 0 || params.window_right >= 0 ||
       params.key_lengths.dtype != FLASHONNX_NONE))
    return false;
  constexpr int64_t kMostBlocks = 65535;  // in a grid's second and third dimension
  if (plan_of(params).all_tiles || params.batch > kMostBlocks || params.q_heads > kMostBlocks)
    return false;
  if (params.kv_length <= Plain::kMostTiles * Plain::kKeys) return true;
  // With more, where there is room for all blocks at once.
  const int64_t tiles = (params.kv_length + General::kKeys - 1) / General::kKeys;
  if (tiles > General::kMostTiles) return false;
  const int64_t room = kSharedMemory / (General::shared_bytes(static_cast<int>(tiles)) + 1024);
  const int64_t row_tiles = (params.q_length + General::kQueries - 1) / General::kQueries;
  return row_tiles * params.q_heads * params.batch <=
         std::min<int64_t>(room, General::kBlocks) * params.device.sm_count;
}

flashonnx_status launch_few_keys(const Params& params, cudaStream_t stream) {
  const Problem p = problem_of(params);
  Plan plan = plan_of(params);
  plan.o_vectors &= strides_fit(params.o, params.batch, params.q_heads, params.q_length);
  return is_plain(p, plan) ? launch_tiling<Plain>(params, p, plan, stream)
                           : launch_tiling<General>(params, p, plan, stream);
}

}  // namespace flashonnx::sm90

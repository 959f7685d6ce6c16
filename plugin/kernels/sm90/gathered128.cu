#include "kernels/sm90/launch_gathered.cuh"

namespace flashonnx::sm90 {

flashonnx_status launch_gathered_128(const Params& params, cudaStream_t stream) {
  return launch_gathered<Gathered<Tiling128>>(params, stream);
}

}  // namespace flashonnx::sm90

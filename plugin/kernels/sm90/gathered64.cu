#include "kernels/sm90/launch_gathered.cuh"

namespace flashonnx::sm90 {

flashonnx_status launch_gathered_64(const Params& params, cudaStream_t stream) {
  return launch_gathered<Gathered<Tiling64>>(params, stream);
}

}  // namespace flashonnx::sm90

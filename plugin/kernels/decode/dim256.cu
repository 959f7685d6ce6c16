#include "kernels/decode/launch.cuh"

namespace flashonnx::decode {

flashonnx_status launch_256(const Problem& problem, const Decode& decode, const Grid& grid,
                            bool bfloat16, cudaStream_t stream) {
  return launch_tiling<Tiling256>(problem, decode, grid, bfloat16, stream);
}

}  // namespace flashonnx::decode

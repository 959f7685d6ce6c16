#include "kernels/sm90/launch.cuh"

namespace flashonnx::sm90 {
namespace {

// Whether tiles of 128 queries are done sooner than those of 192. A round of the multiprocessors
// takes a tile's fixed time and the time of its steps, measured on an H200 in hundredths of a
// microsecond; that of tiles of 128 is 0.75 to 0.8 of the others', which pays where it does not
// take more of them. Causal ones compute less that is not needed: 1024 queries in 315 instead of
// 299 TFLOP/s, 2048 in 397 instead of 427.
bool prefers_short_tiles(const Params& params) {
  if (params.is_causal) return params.q_length <= 1024;
  const int64_t heads = params.batch * params.q_heads, steps = (params.kv_length + 127) / 128;
  const auto time = [&](int64_t queries, int64_t fixed, int64_t step) {
    const int64_t tiles = heads * ((params.q_length + queries - 1) / queries);
    const int64_t rounds = (tiles + params.device.sm_count - 1) / params.device.sm_count;
    return rounds * (fixed + steps * step);
  };
  return time(128, 176, 95) < time(192, 202, 128);
}

}  // namespace

flashonnx_status launch_64(const Params& params, void* workspace, cudaStream_t stream) {
  if (params.q_bias.dtype != FLASHONNX_NONE) {
    const Plan plan = plan_of(params);
    return prefers_short_tiles(params)
               ? launch_tiling<Biased<Short64>>(params, plan, PackedMask(), stream)
               : launch_tiling<Biased<Tiling64>>(params, plan, PackedMask(), stream);
  }
  return prefers_short_tiles(params)
             ? launch_one_of<Short64, MaskedShort64, General64>(params, workspace, stream)
             : launch_one_of<Tiling64, Masked64, General64>(params, workspace, stream);
}

}  // namespace flashonnx::sm90

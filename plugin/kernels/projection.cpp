#include "kernels/projection.h"

#include "kernels/checks.h"

namespace flashonnx {
namespace {

struct Field {
  flashonnx_tensor Params::* tensor;
  flashonnx_tensor Params::* bias;
  int64_t Params::* heads;
  int64_t Params::* rows;
  int64_t Params::* dim;
};

constexpr Field kFields[] = {
    {&Params::q, &Params::q_bias, &Params::q_heads, &Params::q_length, &Params::head_dim},
    {&Params::k, &Params::k_bias, &Params::kv_heads, &Params::kv_length, &Params::head_dim},
    {&Params::v, &Params::v_bias, &Params::kv_heads, &Params::kv_length, &Params::value_dim}};

}  // namespace

bool has_projection_bias(const Params& params) {
  return present(params.q_bias) || present(params.k_bias) || present(params.v_bias);
}

Params with_sums(const Params& params, Sums* sums) {
  Params summed = params;
  const int64_t size = params.q.dtype == FLASHONNX_FLOAT32 ? 4 : 2;
  for (int i = 0; i < 3; ++i) {
    const Field& field = kFields[i];
    if (!present(params.*field.bias)) continue;
    const int64_t row = params.*field.heads * params.*field.dim, rows = params.*field.rows;
    sums->offsets[i] = sums->bytes;
    sums->bytes += (params.batch * rows * row * size + 255) / 256 * 256;
    summed.*field.tensor = {nullptr, {rows * row, params.*field.dim, row, 1}, params.q.dtype, 0};
    summed.*field.bias = {};
  }
  return summed;
}

flashonnx_status add_biases(const Params& params, const Sums& sums, char* workspace, Params* summed,
                            [[maybe_unused]] void* stream) {
  BiasedProjection projections[3] = {};
  for (int i = 0; i < 3; ++i) {
    const Field& field = kFields[i];
    if (sums.offsets[i] < 0) continue;
    (summed->*field.tensor).data = workspace + sums.offsets[i];
    projections[i] = {params.*field.tensor, params.*field.bias, summed->*field.tensor, params.batch,
                      params.*field.heads,  params.*field.rows, params.*field.dim};
  }
  if (params.device.kind == FLASHONNX_CPU) {
    for (const BiasedProjection& projection : projections) cpu::add_bias(params, projection);
    return ok();
  }
#ifdef FLASHONNX_WITH_CUDA
  return add_biases_cuda(projections, stream);
#else
  return make_status(FLASHONNX_NOT_IMPLEMENTED,
                     "FlashAttention: this build of the library has no CUDA kernels");
#endif
}

}  // namespace flashonnx

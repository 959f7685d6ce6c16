// A libflashonnx in which the device "CPU" runs the CUDA kernels of this folder, and of cache/, in
// the emulator, one call at a time, so that the tests of the seam exercise them on machines without
// a GPU:
//
//   g++ -std=c++20 -O1 -fPIC -shared -I plugin/kernels/simt/emulator -I plugin -I plugin/include \
//       -isystem $CUDA/include -DFLASHONNX_VERSION='"emulated"' \
//       plugin/kernels/{attention,projection,resolve,validate,validate_cache}.cpp \
//       plugin/kernels/common/problem.cpp plugin/kernels/simt/emulator/library.cpp \
//       -o libflashonnx_emulated.so
//   FLASHONNX_LIBRARY=libflashonnx_emulated.so pytest tests/test_kernels.py
//   tests/test_cache_kernels.py -k "cpu and not many"
//
// With -fsanitize=address,undefined (and LD_PRELOAD of libasan) accesses outside any buffer are
// caught too.
#include "emulator.h"
// After it:
#include <mutex>

#include "kernels/cache/append.cu"
#include "kernels/cpu/concat.h"
#include "kernels/projection.h"
#include "kernels/simt/add_bias.cu"
#include "kernels/simt/bits16.cu"
#include "kernels/simt/combine.cu"
#include "kernels/simt/concat.cu"
#include "kernels/simt/float32.cu"
#include "kernels/simt/gathered_bits16.cu"
#include "kernels/simt/gathered_float32.cu"
#include "kernels/simt/launch.cu"

extern "C" const char* cudaGetErrorString(cudaError_t) { return "emulated"; }
// None of the code is Hopper's, and launches do not overlap.
extern "C" cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  return cudaSuccess;
}
extern "C" cudaError_t cudaDriverGetVersion(int* version) {
  *version = 0;
  return cudaSuccess;
}

namespace flashonnx::cpu {
namespace {

std::mutex one_call;

Params on_h200(const Params& params) {
  Params p = params;
  p.device = {FLASHONNX_CUDA, 0, 90, 132, 227 << 10};
  return p;
}

}  // namespace

flashonnx_status prepare(const Params& params, const Params& problem) {
  const std::lock_guard lock(one_call);
  return prepare_cuda(params, problem, nullptr);
}

int64_t workspace(const Params& params) { return simt::workspace(on_h200(params)); }

flashonnx_status launch(const Params& params, void* workspace, void* stream) {
  const std::lock_guard lock(one_call);
  return simt::launch(on_h200(params), workspace, stream);
}

void add_bias(const Params&, const BiasedProjection& projection) {
  const std::lock_guard lock(one_call);
  (void)add_biases_cuda({projection, {}, {}}, nullptr);
}

void concat(const Params& params, const flashonnx_tensor& present, const flashonnx_tensor& past,
            const flashonnx_tensor& rows, int64_t dim, int64_t element_size, bool copy_past) {
  const std::lock_guard lock(one_call);
  (void)concat_cuda(present, past, rows, params.batch, params.kv_heads, params.past_length,
                    params.kv_length, dim, element_size, copy_past, nullptr);
}

}  // namespace flashonnx::cpu

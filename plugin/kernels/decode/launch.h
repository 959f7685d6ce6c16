// The kernels, one function per bucket of head dimensions, each in its own file; and the launches
// of those that bring parts together.
#pragma once

#include "kernels/common/overlap.cuh"
#include "kernels/decode/problem.h"

namespace flashonnx::decode {

using Kernel = void (*)(Problem, Decode);

// `shares`: of equal shares of all tiles, which only tilings of 8 rows have.
Kernel kernel_64(bool shares, bool bfloat16);
Kernel kernel_64_wide(bool shares, bool bfloat16);
Kernel kernel_128(bool shares, bool bfloat16);
Kernel kernel_128_wide(bool shares, bool bfloat16);
Kernel kernel_256(bool shares, bool bfloat16);

// Where decode.partitions > 1, or there are shares. `overlap`: it may be launched while the kernel
// before it still runs.
flashonnx_status launch_combine(const Problem& problem, const Decode& decode, bool bfloat16,
                                bool overlap, cudaStream_t stream);
flashonnx_status launch_combine_shares(const Problem& problem, const Decode& decode, int64_t units,
                                       bool overlap, cudaStream_t stream);

}  // namespace flashonnx::decode

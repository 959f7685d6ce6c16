// One launch function per bucket of head dimensions, each in its own file, and the kernel that
// brings partitions together.
#pragma once

#include "kernels/common/overlap.cuh"
#include "kernels/decode/problem.h"

namespace flashonnx::decode {

struct Grid {
  int64_t units;  // tiles of rows of a key head
  int64_t cluster, partitions;
  bool adaptable;        // the cluster may be smaller, so that all units run side by side
  int64_t shared_bytes;  // of a block
  int64_t shared_limit;  // of the device for a block
  bool overlap;          // may be launched while the kernel before it still runs
  bool room;             // which is a small one
  int64_t blocks;        // of equal shares of all tiles; 0: otherwise
};

flashonnx_status launch_64(const Problem& problem, const Decode& decode, const Grid& grid,
                           bool bfloat16, cudaStream_t stream);
flashonnx_status launch_64_wide(const Problem& problem, const Decode& decode, const Grid& grid,
                                bool bfloat16, cudaStream_t stream);
flashonnx_status launch_128(const Problem& problem, const Decode& decode, const Grid& grid,
                            bool bfloat16, cudaStream_t stream);
flashonnx_status launch_128_wide(const Problem& problem, const Decode& decode, const Grid& grid,
                                 bool bfloat16, cudaStream_t stream);
flashonnx_status launch_256(const Problem& problem, const Decode& decode, const Grid& grid,
                            bool bfloat16, cudaStream_t stream);

// Where decode.partitions > 1, or there are shares. `overlap`: it may be launched while the kernel
// before it still runs.
flashonnx_status launch_combine(const Problem& problem, const Decode& decode, bool bfloat16,
                                bool overlap, cudaStream_t stream);
flashonnx_status launch_combine_shares(const Problem& problem, const Decode& decode, int64_t units,
                                       bool overlap, cudaStream_t stream);

}  // namespace flashonnx::decode

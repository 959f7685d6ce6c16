// From the problem that a caller has to the one that kernels solve: keys in one place, lengths and
// offsets as numbers of the sequence, all of the past, caches and rotary embeddings done before.
#pragma once

#include <cstdint>

#include "kernels/table.h"

namespace flashonnx {

// A part of the workspace.
struct Part {
  int64_t offset = 0;
  int64_t bytes = 0;  // 0: not needed
};

// What is to be done before the kernel runs, and what it is then given.
struct Resolved {
  Params problem;            // tensors that lie in the workspace have no data yet
  bool concatenate = false;  // past and new rows have to be brought together
  bool prepare = false;      // there is a cache or a ragged batch: see cache/prepare.h
  Part keys, values;         // concatenated, where the caller has no use for them
  // A 0 follows the numbers of key_lengths and cu_seqlens_q, for a kernel to count with.
  Part key_lengths;                 // (B) int32: of the cache after this call
  Part cu_seqlens_q, cu_seqlens_k;  // (B + 1) int32: in order and range
  Part queries;                     // rotated
  int64_t bytes = 0;                // of all parts; the kernel's own workspace follows
};

// Of a problem that has been validated.
void resolve(const Params& params, Resolved* resolved);

// Does what comes before the kernel, and points the problem to the workspace. On the CPU or, on
// `stream`, on the current device.
flashonnx_status prepare(const Params& params, Resolved* resolved, char* workspace, void* stream);

}  // namespace flashonnx

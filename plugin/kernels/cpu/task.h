// What launch.cpp and the per-instruction-set kernels share. Plain data only: a function here would
// be compiled with AVX flags in one file and without in another, and the linker keeps just one of
// them.
#pragma once

#include <cstdint>

#include "flashonnx/attention.h"

namespace flashonnx::cpu {

// Keys packed at a time: K and V tiles of D = 64 are 32 KiB each.
constexpr int kKeyTile = 128;
// Query rows that share a packed key tile, whose packing costs about as much as the products of a
// few rows; fewer where head dimensions are large, so that Q and O of a task stay in the L2 cache.
constexpr int kMaxRows = 240;
constexpr int kMinRows = 48;
// Rows whose scores are alive at a time: 24 x 128 floats, a third of the L1 cache.
constexpr int kBlockRows = 24;
// With so few rows of a key head, a task does not pack keys at all.
constexpr int kDirectRows = 4;
// The widest panel of any instruction set. Head dimensions are padded to it in scratch.
constexpr int kPad = 32;
constexpr int kMaxHeadDim = 512;

// How a problem is cut into tasks. A task is `rows` consecutive rows of one (batch, key head); row
// r of the G * Sq rows of a key head is query r / G of its query head r % G, so that grouped heads
// share packed keys and a causal tile spans few queries.
struct Plan {
  int64_t group;       // G = Hq / Hkv
  int64_t total_rows;  // G * Sq; of a ragged batch: of the longest
  int64_t rows;
  int64_t row_tiles;
  int64_t tasks;
  int64_t padded_head_dim;
  int64_t padded_value_dim;
  // Scratch of a worker, in floats: offsets of the parts and the whole.
  int64_t q, o, k, v, scores, biases, gathered, scratch;
};

// One row's leading features, rotated in float32; the others are copied.
struct Rotation {
  const void* source;
  void* target;
  const void* cos;  // rotary_dim / 2 each
  const void* sin;
  int32_t dtype, table_dtype;  // of the row, and of cos and sin
  bool interleaved;
  int64_t head_dim, rotary_dim;
};
using Rotate = void (*)(const Rotation&);
Rotate best_rotate();

// sum = row + bias, `count` elements of each.
using AddRow = void (*)(int32_t dtype, const void* row, const void* bias, int64_t count, void* sum);
AddRow best_add_row();

namespace generic {
void rotate(const Rotation& job);
void add_row(int32_t dtype, const void* row, const void* bias, int64_t count, void* sum);
void run_task(const flashonnx_attention_params& params, const Plan& plan, int64_t task,
              float* scratch);
}  // namespace generic
namespace avx2 {
void rotate(const Rotation& job);
void add_row(int32_t dtype, const void* row, const void* bias, int64_t count, void* sum);
void run_task(const flashonnx_attention_params& params, const Plan& plan, int64_t task,
              float* scratch);
}  // namespace avx2
namespace avx512 {
void rotate(const Rotation& job);
void add_row(int32_t dtype, const void* row, const void* bias, int64_t count, void* sum);
void run_task(const flashonnx_attention_params& params, const Plan& plan, int64_t task,
              float* scratch);
}  // namespace avx512

}  // namespace flashonnx::cpu

// Turns a validated problem into what the kernel is told.
#include <algorithm>
#include <array>
#include <cstdint>

#include "kernels/common/status.h"
#include "kernels/simt/config.h"
#include "kernels/simt/launch.h"
#include "kernels/table.h"

namespace flashonnx::simt {
namespace {

View view(const flashonnx_tensor& tensor) {
  return {tensor.data, tensor.stride[0], tensor.stride[1], tensor.stride[2]};
}

int64_t element_size(int32_t dtype) { return dtype == FLASHONNX_FLOAT32 ? 4 : 2; }

// Whether every row consists of whole, aligned vectors of `bytes`. Strides of dimensions of size 1
// are never used.
bool rows_aligned(const flashonnx_tensor& tensor, int64_t batch, int64_t heads, int64_t rows,
                  int64_t dim, int64_t bytes) {
  const int64_t sizes[3] = {batch, heads, rows};
  bool aligned = reinterpret_cast<uintptr_t>(tensor.data) % bytes == 0 &&
                 dim * element_size(tensor.dtype) % bytes == 0;
  for (int i = 0; i < 3; ++i) {
    aligned &= sizes[i] <= 1 || tensor.stride[i] * element_size(tensor.dtype) % bytes == 0;
  }
  return aligned;
}

Problem problem_of(const Params& params) {
  Problem p = {};
  p.q = view(params.q), p.k = view(params.k), p.v = view(params.v), p.o = view(params.o);
  p.output_dtype = params.o.dtype;
  p.bfloat16 = params.q.dtype == FLASHONNX_BFLOAT16;
  if (params.lse.dtype != FLASHONNX_NONE) p.lse = view(params.lse);
  p.key_limit = static_cast<int32_t>(params.kv_length);
  if (params.mask.dtype != FLASHONNX_NONE) {
    p.mask = view(params.mask);
    p.mask_key = params.mask.stride[3];
    p.mask_dtype = params.mask.dtype;
    p.key_limit = static_cast<int32_t>(params.mask_keys);
  }
  if (params.key_lengths.dtype != FLASHONNX_NONE) {
    p.key_lengths = params.key_lengths.data;
    p.key_lengths_stride = params.key_lengths.stride[0];
    p.lengths_64 = params.key_lengths.dtype == FLASHONNX_INT64;
  }
  if (params.sinks.dtype != FLASHONNX_NONE) {
    p.sinks = static_cast<const float*>(params.sinks.data);
    p.sinks_stride = params.sinks.stride[0];
  }
  p.ragged = ragged_of(params);
  p.pages = pages_of(params);
  if (p.ragged.queries) p.q.batch = p.o.batch = p.lse.batch = 0;
  if (p.ragged.keys || p.pages.table) p.k.batch = p.v.batch = 0;
  const Rows queries = query_rows(params), keys = key_rows(params);
  p.splits = 1;
  p.batch_heads = queries.batch * params.q_heads;
  p.q_heads = static_cast<int32_t>(params.q_heads);
  p.group = static_cast<int32_t>(params.q_heads / params.kv_heads);
  p.q_length = static_cast<int32_t>(params.q_length);
  p.key_length = static_cast<int32_t>(params.kv_length);
  p.head_dim = static_cast<int32_t>(params.head_dim);
  p.value_dim = static_cast<int32_t>(params.value_dim);
  p.offset = params.causal_offset;
  p.offset_from_lengths = params.offset_from_lengths;
  p.left = params.window_left;
  p.right = params.is_causal ? 0 : params.window_right;
  p.tiles_outermost = p.left >= 0 || p.right >= 0;
  p.empty_row_mean = params.empty_row == FLASHONNX_EMPTY_ROW_MEAN;
  p.scale = params.scale;
  p.softcap = params.softcap;
  p.q_vectors =
      rows_aligned(params.q, queries.batch, params.q_heads, queries.rows, params.head_dim, 16);
  p.k_vectors = rows_aligned(params.k, keys.batch, params.kv_heads, keys.rows, params.head_dim, 16);
  p.v_vectors =
      rows_aligned(params.v, keys.batch, params.kv_heads, keys.rows, params.value_dim, 16);
  p.o_vectors = rows_aligned(params.o, queries.batch, params.q_heads, queries.rows,
                             params.value_dim, 4 * element_size(params.o.dtype));
  return p;
}

// How many blocks share the keys of a tile of queries. Only a problem that leaves most of the
// device idle is split.
constexpr int64_t kMaxSplits = 32;   // launch_combine has one lane for each
constexpr int64_t kSplitKeys = 256;  // fewer are not worth a block of their own

struct Tile {
  int64_t dim, rows,
      slots;  // largest head dimension, queries a block, blocks the device holds at once
};

template <class C>
Tile tile_of(int64_t sm_count) {
  return {C::kHeadDim, C::kBlockRows, sm_count * C::kMinBlocks};
}

// The tilings of launch.cuh.
std::array<Tile, 4> tiles_of(int64_t sm_count) {
  return {tile_of<Tiling64>(sm_count), tile_of<Tiling128>(sm_count), tile_of<Tiling256>(sm_count),
          tile_of<Tiling512>(sm_count)};
}

int64_t splits_of(const Params& params) {
  if (params.fixed_split) return 1;
  const int64_t dim = std::max(params.head_dim, params.value_dim);
  for (const Tile& tile : tiles_of(params.device.sm_count)) {
    if (dim > tile.dim) continue;
    const int64_t tiles = params.cu_seqlens_q.dtype == FLASHONNX_NONE
                              ? (params.q_length + tile.rows - 1) / tile.rows * params.batch
                              : params.q_tokens / tile.rows + params.batch;  // see find_tile
    const int64_t blocks = tiles * params.q_heads;
    return std::max<int64_t>(
        1, std::min({tile.slots / blocks, params.kv_length / kSplitKeys, kMaxSplits}));
  }
  return 1;
}

// The same problem with partial outputs in the workspace, which are dense: (splits, B, Hq, Sq, Dv),
// and twice (splits, B, Hq, Sq); of a ragged batch without the B, and with all tokens as Sq. Maxima
// and sums stay apart: beside a maximum of finfo.min a sum's logarithm would be lost.
Problem split_problem(const Problem& whole, int64_t splits, float* workspace) {
  Problem p = whole;
  const bool ragged = p.ragged.queries != nullptr;
  const int64_t rows = ragged ? p.ragged.tokens : p.q_length;
  const int64_t heads = p.q_heads, dim = p.value_dim, all = p.batch_heads * rows;
  p.splits = static_cast<int32_t>(splits);
  p.o = {workspace, ragged ? 0 : heads * rows * dim, rows * dim, dim};
  p.o_split = all * dim;
  p.lse = {workspace + splits * p.o_split, ragged ? 0 : heads * rows, rows, 1};
  p.lse_split = all;
  p.sums = static_cast<float*>(p.lse.data) + splits * all;
  p.output_dtype = FLASHONNX_FLOAT32;
  p.o_vectors = dim % 4 == 0;  // the workspace is aligned to 256 bytes
  p.sinks = nullptr;
  p.empty_row_mean = 0;
  return p;
}

flashonnx_status launch_problem(const Params& params, const Problem& problem, cudaStream_t stream) {
  const bool gathered = problem.ragged.queries || problem.pages.table;
  const auto launch = params.q.dtype == FLASHONNX_FLOAT32
                          ? (gathered ? launch_gathered_float32 : launch_float32)
                          : (gathered ? launch_gathered_16bit : launch_16bit);
  return launch(problem, params.device.shared_memory, stream);
}

}  // namespace

// For this problem and for every smaller one, as an engine with dynamic shapes needs it (fewer
// queries: more splits). splits <= slots / blocks, and a block has at most tile.rows queries, so
// that splits * queries <= slots * tile.rows.
int64_t workspace(const Params& params) {
  const int64_t most_splits = std::min(params.kv_length / kSplitKeys, kMaxSplits);
  if (most_splits < 2 || params.fixed_split) return 0;
  int64_t slot_rows = 0;
  for (const Tile& tile : tiles_of(params.device.sm_count))
    slot_rows = std::max(slot_rows, tile.slots * tile.rows);
  const Rows queries = query_rows(params);
  const int64_t rows = queries.batch * queries.rows * params.q_heads;
  return std::min(slot_rows, most_splits * rows) * (params.value_dim + 2) * 4;
}

const char* refusal(const Params& params) {
  constexpr int64_t kMaxCount = int64_t{1} << 31;
  constexpr int64_t kMaxPositions =
      kMaxCount - 1024;  // positions, up to a tile past the end, are counted in 32 bits
  if (params.q_length > kMaxPositions || params.kv_length > kMaxPositions - params.q_length) {
    return "counts queries and keys together up to 2^31";
  }
  if (params.batch >= kMaxCount || params.q_heads >= kMaxCount) {
    return "counts batches and heads up to 2^31";
  }
  const bool gathered =
      params.cu_seqlens_q.dtype != FLASHONNX_NONE || params.block_table.dtype != FLASHONNX_NONE;
  if (gathered && params.empty_row == FLASHONNX_EMPTY_ROW_MEAN)
    return "leaves empty rows 0 in ragged batches and with pages";
  return nullptr;
}

flashonnx_status launch(const Params& params, void* workspace, void* stream) {
  const Problem problem = problem_of(params);
  const int64_t splits = workspace ? splits_of(params) : 1;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (splits == 1) return launch_problem(params, problem, cuda_stream);
  const Problem partial = split_problem(problem, splits, static_cast<float*>(workspace));
  FLASHONNX_RETURN_IF_ERROR(launch_problem(params, partial, cuda_stream));
  return launch_combine(problem, partial, params.v.dtype, cuda_stream);
}

}  // namespace flashonnx::simt

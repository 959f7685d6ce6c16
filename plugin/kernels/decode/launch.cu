// Which problems are taken, and over how many blocks their keys are spread.
#include "kernels/decode/launch.h"

#include <algorithm>
#include <limits>

#include "kernels/common/carveout.h"
#include "kernels/common/status.h"
#include "kernels/decode/after_append.h"
#include "kernels/decode/config.h"

namespace flashonnx::decode {
namespace {

bool present(const flashonnx_tensor& tensor) { return tensor.dtype != FLASHONNX_NONE; }

constexpr int64_t divide_up(int64_t x, int64_t y) { return (x + y - 1) / y; }

// Of a key head: the queries of all its query heads.
int64_t packed_rows(const Params& params) {
  return params.q_heads / params.kv_heads * params.q_length;
}

// What the choice of a grid knows of a tiling.
struct Shape {
  int dim, rows, ring_bytes, query_bytes, extra_bytes, own_bytes;
  Kernel (*kernel)(bool shares, bool bfloat16);
};

template <class C>
constexpr Shape shape_of(decltype(Shape::kernel) kernel) {
  return {C::kDim, C::kRows, C::kRingBytes, C::kQueryBytes, C::kExtraBytes, C::kOwnBytes, kernel};
}

Shape shape_of(const Params& params) {
  const int64_t dim = std::max(params.head_dim, params.value_dim);
  const bool wide = packed_rows(params) > 8;
  if (dim <= 64) {
    return wide ? shape_of<Tiling64Wide>(kernel_64_wide) : shape_of<Tiling64>(kernel_64);
  }
  if (dim <= 128) {
    return wide ? shape_of<Tiling128Wide>(kernel_128_wide) : shape_of<Tiling128>(kernel_128);
  }
  return shape_of<Tiling256>(kernel_256);
}

int64_t row_tiles_of(const Params& params, const Shape& shape) {
  return divide_up(packed_rows(params), shape.rows);
}

// Tiles of rows of a key head, of all batch entries.
int64_t units_of(const Params& params, const Shape& shape) {
  return params.batch * params.kv_heads * row_tiles_of(params, shape);
}

constexpr int kMaxWarps = Tiling128::kMaxWarps;
constexpr int64_t kMaxResident = 4;  // blocks on a multiprocessor
constexpr int64_t kMaxPartitions = 64;
constexpr int64_t kMostLengths = 32;              // of a batch in equal shares
constexpr int64_t kShareRows = Tiling128::kRows;  // of its units
constexpr int64_t kFixedSplits = 8;               // where results may not depend on batch mates

// Elements of the unit in which places of keys are counted: a vector's, or one.
int64_t place_unit(const Params& params) {
  constexpr int64_t kVector = kUnitBytes / 2;
  bool vectors = true;
  for (const flashonnx_tensor& tensor : {params.k, params.v}) {
    vectors &= tensor.stride[2] % kVector == 0;
    vectors &= !present(params.block_table) || tensor.stride[0] % kVector == 0;
  }
  return vectors ? kVector : 1;
}

// Whether 32 bits count the units from the first place of a tensor to its last one.
bool places_fit(const Params& params, const flashonnx_tensor& tensor) {
  const bool paged = present(params.block_table);
  const auto slots = static_cast<double>(paged ? params.page_size : params.kv_length);
  const auto pages = static_cast<double>(paged ? params.num_pages : 0);
  const auto page = static_cast<double>(tensor.stride[0]),
             row = static_cast<double>(tensor.stride[2]);
  const double last = slots * row + pages * (paged ? page : 0);
  return row >= 0 && (!paged || page >= 0) &&
         last < 0x1p32 * static_cast<double>(place_unit(params));
}

// Warps of a block, whose rings want much shared memory, if so many blocks are to share a
// multiprocessor.
int64_t warps_of(const Shape& shape, int64_t shared_memory, int64_t resident) {
  constexpr int64_t kReserved = 1024;  // by the system, for each block
  const int64_t bytes = (shared_memory + kReserved) / resident - kReserved - shape.extra_bytes;
  return std::clamp<int64_t>(bytes / shape.ring_bytes, resident == 1 ? 1 : 0, kMaxWarps / resident);
}

// Blocks of a cluster can send each other their results; where there are none, 1.
int64_t max_cluster(const flashonnx_device& device) {
  return device.arch == 90 && device.sm_count >= 64 ? Tiling128::kMaxCluster : 1;
}

struct Split {
  int64_t warps, cluster, partitions;
  int64_t blocks = 0;  // of equal shares of all tiles, one for each warp; 0: otherwise
};

// Over how many blocks, of how many warps, the keys of a tile of rows are spread: a cluster, which
// brings its results together by itself; or several, or blocks without clusters, which needs the
// workspace and another kernel. The numbers were measured on an H200.
Split split_of(const Params& params, const Shape& shape) {
  const int64_t rows = packed_rows(params);
  const int64_t units = std::max<int64_t>(units_of(params, shape), 1);
  const int64_t tiles = std::max<int64_t>(divide_up(params.kv_length, kTileKeys), 1);
  const int64_t largest = max_cluster(params.device), processors = params.device.sm_count;
  const int64_t whole = warps_of(shape, params.device.shared_memory, 1);
  const int64_t half = warps_of(shape, params.device.shared_memory, 2);
  // The capacity alone counts if results may not depend on batch mates.
  if (params.fixed_split) {
    constexpr int64_t kFixedTiles = 32;
    const int64_t wanted = std::clamp<int64_t>(divide_up(tiles, kFixedTiles), 1, kFixedSplits);
    return largest > 1 ? Split{whole, wanted, 1} : Split{whole, 1, wanted};
  }
  // Little work: what counts is how soon it begins and how quickly results are together.
  if (largest > 1 && units * tiles <= 8 * processors) {
    const int64_t warps = std::min<int64_t>(whole, 4);
    return {warps, std::clamp<int64_t>(tiles / (2 * warps), 1, largest), 1};
  }
  // Blocks as large as a multiprocessor, unless smaller ones, two of them on each, keep clearly
  // more warps busy, or there are so many that one may begin while another ends.
  const auto spread = [&](int64_t warps, int64_t resident) {
    return std::clamp<int64_t>(processors * resident / units, 1, divide_up(tiles, warps));
  };
  const auto busy = [&](int64_t warps, int64_t resident) {
    const int64_t slots = processors * resident, blocks = units * spread(warps, resident);
    return static_cast<double>(blocks * warps) / (divide_up(blocks, slots) * processors);
  };
  const bool halves = half >= 3 && (units > processors || busy(half, 2) > 1.1 * busy(whole, 1));
  const int64_t warps = halves ? half : whole, wanted = spread(warps, halves ? 2 : 1);
  if (largest == 1) return {warps, 1, std::min(wanted, kMaxPartitions)};
  // Where the largest clusters leave most of the device idle, several small ones.
  const bool many = 2 * largest * units < processors * 9 / 10 && tiles >= 64 * largest;
  if (many) return {warps, 2, std::min(wanted / 2, kMaxPartitions)};
  // Clusters of three and more do not find room everywhere: some nine in ten of the places are of
  // use to them. Where that leaves a fifth of the device idle, and there is much to read (1 MB a
  // multiprocessor, by one unit alone), single blocks, which spread over all of it, and the other
  // kernel are worth their while.
  const int64_t resident = halves ? 2 : 1, slots = processors * resident;
  int64_t cluster = std::min(wanted, largest);
  if (cluster > 2) cluster = std::min(cluster, slots * 9 / 10 / units);
  constexpr int64_t kMuch = 128 * 128;  // tiles times head size
  // Where a tenth is idle, and there is almost as much to read, equal shares of all tiles, if a
  // warp's lanes can hold all lengths; a little more if clusters, without another kernel, would do.
  // Not of so few units that each has a hundred parts and more.
  constexpr int64_t kMostTiles = std::numeric_limits<int32_t>::max();
  const int64_t turns = divide_up(cluster * units, slots);
  const int64_t much = (cluster > 1 ? 14 : 13) * kMuch * processors / 16;
  if (10 * cluster * units < 9 * turns * slots && units * largest > processors &&
      rows <= kShareRows && params.batch <= kMostLengths && units * tiles <= kMostTiles &&
      units * tiles * shape.dim >= much) {
    return {whole, 1, 1, processors};
  }
  if (10 * cluster * units < 8 * slots && rows <= shape.rows && units * largest > processors &&
      units * tiles * shape.dim >= kMuch * processors) {
    for (const int64_t blocks : {int64_t{2}, kMaxResident}) {  // on a multiprocessor
      const int64_t fewer = warps_of(shape, params.device.shared_memory, blocks);
      const int64_t parts = std::min(processors * blocks / units, kMaxPartitions);
      const bool full = blocks == kMaxResident || 10 * parts * units >= 9 * processors * blocks;
      if (fewer > 0 && parts > 1 && full) return {fewer, 1, parts};
    }
  }
  return {warps, std::min(wanted, largest), 1};
}

int64_t partial_bytes(const Params& params, int64_t rows, int64_t partitions) {
  return partitions > 1 ? partitions * rows * (divide_up(params.value_dim, 4) * 4 + 2) * 4 : 0;
}

// Equal shares: units have parts, one more than there are changes from one warp or unit to the
// next.
int64_t parts_of(const Params& params, const Split& split) {
  return split.blocks * split.warps + params.batch * params.kv_heads;
}

int64_t part_bytes(const Shape& shape, int64_t parts, int64_t rows) {
  return parts * rows * (shape.dim + 2) * 4;
}

// Whether it is faster with several queries than kernels that do not split keys. Measured on an
// H200 at head size 128: those take 12 ns for each key and each turn of 128 queries of a head on
// all multiprocessors, this one 1 ns for each tile of a unit.
bool few_queries(const Params& params, int64_t rows) {
  constexpr int64_t kFewQueries = 16, kFewRows = 64, kMostQueries = 64, kMostRows = 512;
  if (params.q_length <= kFewQueries && rows <= kFewRows) return true;
  // Nothing else may depend on the batch with fixed_split; masks and ragged batches were not
  // measured.
  if (params.fixed_split || present(params.mask) || present(params.cu_seqlens_q)) return false;
  if (params.q_length > kMostQueries || rows > kMostRows) return false;
  const int64_t processors = params.device.sm_count;
  const int64_t turns = divide_up(params.batch * params.q_heads, processors);
  const int64_t units = units_of(params, shape_of(params));
  return params.kv_length >= 8 * params.q_length && 5 * units <= 7 * processors * turns;
}

}  // namespace

const char* refusal(const Params& params) {
  constexpr int64_t kMaxCount = std::numeric_limits<int32_t>::max();
  constexpr int64_t kFewKeys = 128;
  const int64_t rows = packed_rows(params);
  if (std::max(params.q_length, params.q_tokens) + params.kv_length > kMostPositions) {
    return "counts queries and keys together up to 2^29";
  }
  if (params.kv_length < kFewKeys) return "is for many keys";
  if (params.fixed_split && present(params.cu_seqlens_q))
    return "is chosen by the longest of ragged sequences, which fixed_split forbids";
  if (params.q_length > 1 && !few_queries(params, rows)) return "is for few queries";
  if (params.batch * params.kv_heads * divide_up(rows, 8) * 16 > kMaxCount)
    return "starts up to 2^31 blocks";
  if (!places_fit(params, params.k) || !places_fit(params, params.v))
    return "takes 64 GB of keys, or of pages, at most (8 GB where they are no whole vectors)";
  if (present(params.block_table) && params.page_size > kMaxCount)
    return "does pages of up to 2^31 slots";
  return nullptr;
}

int64_t workspace(const Params& params) {
  const Shape shape = shape_of(params);
  const Split split = split_of(params, shape);
  if (split.blocks > 0) return part_bytes(shape, parts_of(params, split), packed_rows(params));
  return partial_bytes(params, units_of(params, shape) * shape.rows, split.partitions);
}

// Partitions are at most the blocks that run side by side, over the number of units of kRows rows.
int64_t workspace_bound(const Params& params) {
  const Shape shapes[] = {shape_of<Tiling64>(kernel_64), shape_of<Tiling64Wide>(kernel_64_wide),
                          shape_of<Tiling128>(kernel_128), shape_of<Tiling128Wide>(kernel_128_wide),
                          shape_of<Tiling256>(kernel_256)};
  if (params.fixed_split) {
    // Every key head has less than a tile of rows more than queries, however many heads there are.
    const int64_t rows = params.q_heads * (params.q_length + Tiling128Wide::kRows - 1);
    return partial_bytes(params, params.batch * rows, kFixedSplits);
  }
  int64_t rows = 0;
  for (const Shape& shape : shapes)
    rows = std::max(rows, int64_t{params.device.sm_count} * kMaxResident * shape.rows);
  const int64_t units = std::min(params.batch, kMostLengths) * params.kv_heads;
  return std::max(
      rows * (divide_up(params.value_dim, 4) * 4 + 2) * 4,
      part_bytes(shape_of(params), params.device.sm_count * kMaxWarps + units, kShareRows));
}

namespace {

// `given`: of a problem whose cache a kernel before this appends to, as the caller has it; else
// null.
Decode decode_of(const Params& params, const Params* given, const Shape& shape, const Split& split,
                 void* workspace) {
  const bool paged = present(params.block_table);
  Decode d = {};
  if (present(params.cu_seqlens_q))
    d.first_queries = static_cast<const int32_t*>(params.cu_seqlens_q.data);
  if (present(params.cu_seqlens_k))
    d.first_keys = static_cast<const int32_t*>(params.cu_seqlens_k.data);
  if (given && present(given->cache_k) && !d.first_queries) {
    d.early = 1;
    d.late_queries = given->rotary_dim > 0;
    d.added = present(given->k) ? static_cast<int32_t>(given->q_length) : 0;
  }
  d.page_size = Divider(2 * kMostPositions), d.pages = 1;
  const int64_t unit = place_unit(params);
  d.unit_bytes = static_cast<uint32_t>(unit * 2);
  d.k_row_units = static_cast<uint32_t>(params.k.stride[2] / unit);
  d.v_row_units = static_cast<uint32_t>(params.v.stride[2] / unit);
  if (paged) {
    d.block_table = static_cast<const int32_t*>(params.block_table.data);
    d.table_batch = params.block_table.stride[0];
    d.table_page = params.block_table.stride[1];
    d.pages = static_cast<uint32_t>(
        std::min<int64_t>(params.num_pages, std::numeric_limits<int32_t>::max()));
    d.k_page_units = static_cast<uint32_t>(params.k.stride[0] / unit);
    d.v_page_units = static_cast<uint32_t>(params.v.stride[0] / unit);
    d.page_size = Divider(static_cast<uint32_t>(params.page_size));
    d.page_of_tiles = params.page_size % kTileKeys == 0;
  }
  // Bounds that bound nothing, or all, may be cut as long as they stay so after any shift.
  constexpr int64_t kFar = 2 * kMostPositions;
  const int64_t right = params.is_causal ? 0 : params.window_right;
  d.first_key = static_cast<int32_t>(
      params.window_left < 0 ? -kFar
                             : clamp(params.causal_offset - params.window_left, -kFar, kFar));
  d.last_key =
      static_cast<int32_t>(right < 0 ? kFar : clamp(params.causal_offset + right + 1, -kFar, kFar));
  d.partitions = Divider(static_cast<uint32_t>(split.partitions));
  d.row_tiles = Divider(static_cast<uint32_t>(row_tiles_of(params, shape)));
  d.kv_heads = Divider(static_cast<uint32_t>(params.kv_heads));
  d.group = Divider(static_cast<uint32_t>(params.q_heads / params.kv_heads));
  d.rows = shape.rows;
  d.warps = static_cast<int32_t>(split.warps);
  // Which strides are used: of tokens in ragged batches, not of the batch; of pages always.
  const int64_t q_batch = d.first_queries ? 1 : params.batch;
  const int64_t q_rows = d.first_queries ? 2 : params.q_length;
  const int64_t kv_batch = paged ? 2 : d.first_keys ? 1 : params.batch;
  d.q_vectors =
      params.head_dim % 8 == 0 && rows_aligned(params.q, q_batch, params.q_heads, q_rows, 16);
  d.vectors = params.head_dim % 8 == 0 && params.value_dim % 8 == 0 &&
              rows_aligned(params.k, kv_batch, params.kv_heads, 2, 16) &&
              rows_aligned(params.v, kv_batch, params.kv_heads, 2, 16);
  d.o_vectors = params.o.dtype == params.q.dtype && params.value_dim % 4 == 0 &&
                rows_aligned(params.o, q_batch, params.q_heads, q_rows, 8);
  d.mask_bytes = size_of(params.mask.dtype);
  d.factor = params.scale * kLog2e;
  if (params.softcap > 0) {
    d.cap_in = params.scale / params.softcap;
    d.cap_out = params.softcap * kLog2e;
  }
  if (split.partitions > 1) {
    d.all_rows = units_of(params, shape) * shape.rows;
    d.partial_dim = static_cast<int32_t>(divide_up(params.value_dim, 4) * 4);
    d.partial_outputs = static_cast<float*>(workspace);
    d.partial_sums = reinterpret_cast<float2*>(d.partial_outputs +
                                               split.partitions * d.all_rows * d.partial_dim);
  }
  if (split.blocks > 0) {
    d.rows = static_cast<int32_t>(packed_rows(params));
    d.batches = static_cast<int32_t>(params.batch);
    d.parts = Divider(static_cast<uint32_t>(split.blocks * split.warps));
    d.partial_dim = shape.dim;
    d.partial_outputs = static_cast<float*>(workspace);
    d.partial_sums =
        reinterpret_cast<float2*>(d.partial_outputs + parts_of(params, split) * d.rows * shape.dim);
  }
  return d;
}

int64_t shared_bytes(const Shape& shape, const Split& split) {
  if (split.blocks > 0) return split.warps * (shape.ring_bytes + shape.query_bytes);
  return split.warps * shape.ring_bytes + (split.cluster > 1 ? shape.extra_bytes : shape.own_bytes);
}

// `overlap`: it may begin while the kernel before still runs; which, `after_append`, is a small
// one.
flashonnx_status launch_attention(const Params& params, const Shape& shape, const Split& split,
                                  const Problem& problem, Decode d, bool overlap, bool after_append,
                                  cudaStream_t stream) {
  const Kernel kernel = shape.kernel(split.blocks > 0, params.q.dtype == FLASHONNX_BFLOAT16);
  const int64_t limit = params.device.shared_memory, units = units_of(params, shape);
  // Per device, so not once per process; it only writes a field of the loaded function.
  FLASHONNX_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            static_cast<int>(limit)));
  bool hopper = false;
  FLASHONNX_RETURN_IF_ERROR(has_hopper_code(reinterpret_cast<const void*>(kernel), &hopper));
  cudaLaunchAttribute attributes[3] = {shared_memory_attribute()};
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {1, 1, 1};
  cudaLaunchConfig_t config = {};
  config.blockDim = dim3(32 * d.warps);
  config.dynamicSmemBytes = shared_bytes(shape, split);
  config.stream = stream;
  config.attrs = attributes;

  // A cluster has to find room in one part of the device, whose sizes are uneven: one that comes
  // second takes as long again as all that came first. So it is smaller, until all run side by
  // side.
  unsigned cluster = hopper ? static_cast<unsigned>(split.cluster) : 1;
  const auto set_cluster = [&] {
    attributes[1].val.clusterDim.x = cluster;
    config.numAttrs = cluster > 1 ? 2 : 1;
    config.gridDim = dim3(static_cast<unsigned>(units * split.partitions) * cluster);
  };
  set_cluster();
  const bool adaptable = !params.fixed_split && split.partitions == 1;
  for (int resident = 0; adaptable && cluster > 1; --cluster, set_cluster()) {
    FLASHONNX_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&resident, kernel, &config));
    if (resident >= units) break;
  }
  if (split.blocks > 0) {
    config.gridDim = dim3(static_cast<unsigned>(split.blocks));
  } else {
    d.cluster = Divider(cluster);
    d.parts = Divider(static_cast<uint32_t>(cluster * split.partitions));
  }
  // Larger clusters begin early only where all find room beside all of their kind: two blocks a
  // multiprocessor. Else they take the places as these become free, two of their blocks on some
  // multiprocessors while others idle, or wait.
  const bool room = after_append || cluster <= 2 ||
                    (2 * static_cast<int64_t>(config.dynamicSmemBytes) < limit &&
                     units * split.partitions * cluster <= params.device.sm_count);
  if (hopper && overlap && room) attributes[config.numAttrs++] = overlap_attribute();
  return cuda_status(cudaLaunchKernelEx(&config, kernel, problem, d), "decode attention kernel");
}

flashonnx_status launch_all(const Params& params, const Params* given, void* workspace,
                            cudaStream_t stream) {
  const Shape shape = shape_of(params);
  const Split split = split_of(params, shape);
  Problem problem = problem_of(params);
  problem.offset_from_lengths = params.offset_from_lengths;  // ragged keys have lengths as well
  const Decode d = decode_of(params, given, shape, split, workspace);
  if (d.early) {
    problem.key_lengths = given->cache_lengths.data;
    problem.key_lengths_stride = given->cache_lengths.stride[0];
    problem.lengths_64 = given->cache_lengths.dtype == FLASHONNX_INT64;
  }
  // Where it takes long, there is nothing to win.
  constexpr int64_t kLongBytes = int64_t{512} << 20;
  const int64_t bytes =
      params.batch * params.kv_heads * params.kv_length * (params.head_dim + params.value_dim) * 2;
  bool overlap = false;
  FLASHONNX_RETURN_IF_ERROR(driver_overlaps(&overlap));
  overlap &= params.device.arch == 90 && (bytes < kLongBytes || given);
  FLASHONNX_RETURN_IF_ERROR(
      launch_attention(params, shape, split, problem, d, overlap, given != nullptr, stream));
  if (split.blocks > 0)
    return launch_combine_shares(problem, d, units_of(params, shape), overlap, stream);
  if (split.partitions == 1) return ok();
  return launch_combine(problem, d, params.q.dtype == FLASHONNX_BFLOAT16, overlap, stream);
}

}  // namespace

flashonnx_status launch(const Params& params, void* workspace, void* stream) {
  return launch_all(params, nullptr, workspace, static_cast<cudaStream_t>(stream));
}

flashonnx_status launch_after_append(const Params& params, const Params& given, void* workspace,
                                     void* stream) {
  return launch_all(params, &given, workspace, static_cast<cudaStream_t>(stream));
}

}  // namespace flashonnx::decode

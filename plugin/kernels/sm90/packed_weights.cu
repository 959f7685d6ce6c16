#include "kernels/sm90/packed_weights.h"

#include <algorithm>

#include "kernels/common/bias.cuh"
#include "kernels/common/cuda.h"
#include "kernels/common/overlap.cuh"
#include "kernels/sm90/coarse.cuh"
#include "kernels/sm90/eight.cuh"
#include "kernels/sm90/quad.cuh"

namespace flashonnx::sm90 {
namespace {

constexpr int kRows = 16;                       // of a block, as of a consumer's warp
constexpr int kWarps = 16;                      // each has tiles of keys
constexpr int kKeys = 128, kMostQueries = 192;  // of a tile
constexpr int64_t kMostDim = 128;  // larger heads are as fast with biases that are added

__device__ __forceinline__ float bias_of(uint16_t x) { return __uint_as_float(uint32_t{x} << 16); }

struct Row {
  const uint16_t* at;
  int first, end;  // the keys that it may see

  __device__ __forceinline__ bool sees(int key) const { return key >= first && key < end; }
};

// The largest bias of each of the thread's rows. All threads of a block call this.
__device__ __forceinline__ void find_tops(const Row (&rows)[2], int keys, float (&top)[2]) {
  __shared__ float tops[kWarps][kRows];
  const int row = threadIdx.x % 32 / 4, warp = threadIdx.x / 32;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float x = -INFINITY;
#pragma unroll 4
    for (int key = warp * 32 + threadIdx.x % 4 * 8; key < keys; key += kWarps * 32) {
      const Eight<uint16_t> eight = read_eight<uint16_t>(rows[h].at, key, keys, 0);
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (rows[h].sees(key + i)) x = fmaxf(x, bias_of(eight.x[i]));
    }
    tops[warp][row + 8 * h] = quad_maximum(x);
  }
  __syncthreads();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    top[h] = -INFINITY;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) top[h] = fmaxf(top[h], tops[i][row + 8 * h]);
  }
}

// Block (x, y): rows 16 x and on of mask y, which are one warp's in the attention kernel. Keys that
// structure hides from a row are seen by nobody and not masked.
__global__ void __launch_bounds__(32 * kWarps)
    weigh_rows(const __grid_constant__ Problem p, int tile_queries, int tile_keys,
               const __grid_constant__ PackedMask packed) {
  let_dependents_launch();
  const int lane = threadIdx.x % 32, quad = lane % 4;
  const int strips = tile_queries / kRows;  // of a tile
  const int row_tile = blockIdx.x / strips, strip = blockIdx.x % strips;
  const int heads = p.mask.head != 0 ? static_cast<int>(p.q_heads) : 1;
  const int batch = blockIdx.y / heads, head = blockIdx.y % heads;
  const int64_t tiles = int64_t{blockIdx.y} * packed.row_tiles + row_tile;
  // What batch entries with lengths of their own that share the mask see is not known.
  const bool known = p.mask.batch != 0 || !p.key_lengths;
  const KeyRange range = key_range(p, known ? key_length_of(p, batch) : p.key_length);
  Row rows[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int query = blockIdx.x * kRows + lane / 4 + 8 * h;
    rows[h].at = static_cast<const uint16_t*>(p.mask.data) + batch * p.mask.batch +
                 head * p.mask.head + min(query, p.q_length - 1) * p.mask.row;
    rows[h].first = known ? range.lower(query) : 0;
    rows[h].end = query >= p.q_length ? 0 : known ? range.upper(query) : p.key_limit;
  }
  float top[2];
  find_tops(rows, p.key_limit, top);
  if (threadIdx.x < 32 && quad == 0) {
    float* const to = packed.top + tiles * tile_queries + strip * kRows + lane / 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) to[8 * h] = fminf(mask_bias(top[h]), kLargestBias);
  }
  const bool levels = __any_sync(0xffffffffu, is_level(top[0]) || is_level(top[1]));
#pragma unroll
  for (int h = 0; h < 2; ++h)
    if (top[h] == -INFINITY) top[h] = 0.f;
#pragma unroll 1
  for (int tile = threadIdx.x / 32; tile < packed.key_tiles; tile += kWarps) {
    const int64_t index = tiles * packed.key_tiles + tile;
    uint4* const to = reinterpret_cast<uint4*>(packed.tiles) +
                      (index * strips + strip) * (kRows * tile_keys / 8) + lane;
    bool seen = false, masked = false;
#pragma unroll 2
    for (int chunk = 0; chunk < tile_keys; chunk += 32) {
      const int key = tile * tile_keys + chunk + 8 * quad;
      uint32_t weights[2][4];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const Eight<uint16_t> eight = read_eight<uint16_t>(rows[h].at, key, p.key_limit, 0);
        float x[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float power = (bias_of(eight.x[i]) - top[h]) * kLog2e;
          x[i] = exp2_approximate(power > 0.f ? 0.f : power);  // a NaN stays one
          seen |= rows[h].sees(key + i) && !(power <= -0x1p100f);
          masked |= rows[h].sees(key + i) && x[i] != 1.f;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) weights[h][i] = pack<__nv_bfloat16>(x[2 * i], x[2 * i + 1]);
        transpose_in_quad(quad, weights[h]);
      }
      to[2 * chunk] = {weights[0][0], weights[1][0], weights[0][1], weights[1][1]};
      to[2 * chunk + 32] = {weights[0][2], weights[1][2], weights[0][3], weights[1][3]};
    }
    const int marks = (__any_sync(0xffffffffu, seen) ? kSeen : 0) |
                      (__any_sync(0xffffffffu, masked) ? kMasked : 0) | (levels ? kLevel : 0);
    for (int i = strip + lane * strips; i < kWeightMarks; i += 32 * strips)
      packed.marks[index * kWeightMarks + i] = static_cast<uint8_t>(marks);
  }
}

int64_t tiles_of(int64_t count, int tile) { return (count + tile - 1) / tile; }

int64_t masks_of(const Params& params) {
  return (params.mask.stride[0] != 0 ? params.batch : 1) *
         (params.mask.stride[1] != 0 ? params.q_heads : 1);
}

// For any tiling.
int64_t bytes_of(const Params& params) {
  const int64_t rows = params.q_length + kMostQueries;
  const int64_t tiles = tiles_of(params.kv_length, kKeys);
  return masks_of(params) *
         (rows * (tiles * kKeys * 2 + 4) + tiles_of(rows, 128) * tiles * kWeightMarks);
}

constexpr int64_t kMostBytes = int64_t{1} << 29;

}  // namespace

bool is_weighed(const Params& params) {
  if (params.mask.dtype != FLASHONNX_BFLOAT16 || params.q.dtype != FLASHONNX_BFLOAT16) return false;
  if (std::max(params.head_dim, params.value_dim) > kMostDim) return false;
  const bool rows = params.mask.stride[2] != 0 && params.q_length > 1;
  if (!rows || params.softcap > 0 || !(params.scale > 0) || params.lse.dtype != FLASHONNX_NONE)
    return false;
  // Packing takes some µs, and about as long as one head that uses what was packed.
  const int64_t heads = params.batch * params.q_heads, masks = masks_of(params);
  return masks < 65536 && heads >= 4 * masks &&
         heads * params.q_length >= (int64_t{1} << 22) / params.kv_length &&
         bytes_of(params) <= kMostBytes;
}

int64_t weights_bytes(const Params& params) { return bytes_of(params); }

int64_t weights_bound(const Params& params) {
  const bool may_be =
      params.mask.dtype == FLASHONNX_BFLOAT16 && params.q.dtype == FLASHONNX_BFLOAT16;
  return may_be ? std::min(bytes_of(params), kMostBytes) : 0;
}

flashonnx_status pack_weights(const Params& params, int queries, int keys, void* workspace,
                              cudaStream_t stream, PackedMask* packed) {
  packed->row_tiles = static_cast<int32_t>(tiles_of(params.q_length, queries));
  packed->key_tiles = static_cast<int32_t>(tiles_of(params.kv_length, keys));
  packed->tile_count = masks_of(params) * packed->row_tiles * packed->key_tiles;
  packed->tiles = static_cast<unsigned char*>(workspace);
  packed->marks = packed->tiles + packed->tile_count * queries * keys * 2;
  packed->top = reinterpret_cast<float*>(packed->marks + packed->tile_count * kWeightMarks);
  const dim3 grid(static_cast<unsigned>(packed->row_tiles * (queries / kRows)),
                  static_cast<unsigned>(masks_of(params)));
  weigh_rows<<<grid, 32 * kWarps, 0, stream>>>(problem_of(params), queries, keys, *packed);
  return cuda_status(cudaGetLastError(), "sm90: packing of a mask's weights");
}

}  // namespace flashonnx::sm90

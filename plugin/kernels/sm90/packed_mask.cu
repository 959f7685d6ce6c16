#include "kernels/sm90/packed_mask.h"

#include <algorithm>

#include "kernels/common/bias.cuh"
#include "kernels/common/cuda.h"
#include "kernels/common/overlap.cuh"
#include "kernels/common/problem.h"
#include "kernels/sm90/coarse.cuh"
#include "kernels/sm90/eight.cuh"

namespace flashonnx::sm90 {
namespace {

constexpr int kMostKeys = 128;  // of a tile
constexpr int kMostQueries = 192, kLeastKeys = 64;

// Of 32 keys' bits those of two neighbours in eight, moved to the lowest two of each four.
__device__ __forceinline__ uint32_t pairs_of(uint32_t keys, int quad) {
  uint32_t x = keys >> 2 * quad & 0x03030303u;
  x = (x | x >> 4) & 0x00330033u;
  return (x | x >> 8) & 0x3333u;
}

// Block (x, y, z): tile x of keys, tile y of queries, mask z; a warp has 16 queries, as consumers'
// do, and a quad of threads two of them. Queries and keys that are none are seen by nobody and not
// hidden from anybody. `hides`: the element that hides a key.
template <class Element>
__global__ void pack_rows(View mask, Element hides, int heads, int queries, int keys, int tile_keys,
                          PackedMask packed) {
  let_dependents_launch();
  const int lane = threadIdx.x % 32, quad = lane % 4;
  const int first_query = (blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32) * 16 + lane / 4;
  const Element* const from = static_cast<const Element*>(mask.data) +
                              blockIdx.z / heads * mask.batch + blockIdx.z % heads * mask.head;
  constexpr int kChunks = kMostKeys / 32;
  Eight<Element> eights[2][kChunks];
#pragma unroll
  for (int i = 0; i < 2 * kChunks; ++i) {
    const int query = min(first_query + i % 2 * 8, queries - 1);
    const int key = blockIdx.x * tile_keys + i / 2 * 32 + quad * 8;
    const int limit = i / 2 * 32 < tile_keys ? keys : 0;
    eights[i % 2][i / 2] = read_eight(from + query * mask.row, key, limit, hides);
  }
  uint32_t bits[kMostKeys / 64] = {};
  bool seen = false, hidden = false, biased = false;
#pragma unroll
  for (int i = 0; i < 2 * kChunks; ++i) {
    const int row = i % 2, chunk = i / 2;
    const int count = keys - (blockIdx.x * tile_keys + chunk * 32 + quad * 8);
    const bool inside = first_query + 8 * row < queries && chunk * 32 < tile_keys && count > 0;
    uint32_t these = 0;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const Element x = eights[row][chunk].x[e];
      if (x != hides) these |= 1u << e;
      if (sizeof(Element) == 2) biased |= inside && x != hides && (x & 0x7fff) != 0;
    }
    const uint32_t all = (1u << min(max(count, 0), 8)) - 1;
    these = inside ? these & all : 0;
    seen |= these != 0;
    hidden |= inside && these != all;
    these <<= 8 * quad;
    these |= __shfl_xor_sync(0xffffffffu, these, 1);
    these |= __shfl_xor_sync(0xffffffffu, these, 2);
    bits[chunk / 2] |= pairs_of(these, quad) << (2 * row + 16 * (chunk % 2));
  }
  const int64_t tile =
      (int64_t{blockIdx.z} * packed.row_tiles + blockIdx.y) * packed.key_tiles + blockIdx.x;
  reinterpret_cast<uint2*>(packed.tiles)[tile * blockDim.x + threadIdx.x] = {bits[0], bits[1]};
  const bool is_seen = __syncthreads_or(seen), is_hidden = __syncthreads_or(hidden);
  const bool is_biased = sizeof(Element) == 2 && __syncthreads_or(biased);
  if (threadIdx.x == 0)
    packed.marks[tile] =
        (is_seen ? kSeen : 0) | (is_hidden ? kMasked : 0) | (is_biased ? kBiased : 0);
}

// A bias as features of its key: the sum of the first three, 8 bits each, is all of a float32.
// An infinite one is the first alone.
__device__ __forceinline__ uint4 split_bias(float bias) {
  const auto upper = [](float x) { return __float_as_uint(x) & 0xffff0000u; };
  const uint32_t high = upper(bias);
  const float rest = fabsf(bias) == INFINITY ? 0.f : bias - __uint_as_float(high);
  const uint32_t middle = upper(rest);
  const uint32_t low = upper(rest - __uint_as_float(middle));
  return {high >> 16 | middle, low >> 16, 0, 0};
}

// An element of a mask, 0 or -infinity of a boolean one; in its own unit, not in powers of 2.
__device__ __forceinline__ float mask_number(uint32_t bits, int dtype) {
  if (dtype == FLASHONNX_FLOAT32 || dtype == FLASHONNX_BFLOAT16)
    return __uint_as_float(dtype == FLASHONNX_BFLOAT16 ? bits << 16 : bits);
  if (dtype == FLASHONNX_FLOAT16)
    return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
  return mask_bias(static_cast<int32_t>(bits));
}

// A block packs a tile. Biases are multiplied by `unit`, and then by `factor` they
// are powers of 2.
__global__ void pack_keys(View mask, int64_t mask_key, int dtype, int bytes, int heads, int keys,
                          int tile_keys, int bias_bytes, float unit, float factor,
                          PackedMask packed) {
  let_dependents_launch();
  const int64_t tile = blockIdx.x;
  const int index = blockIdx.x / packed.key_tiles;
  const int in_tile = threadIdx.x;
  const int key = (blockIdx.x - index * packed.key_tiles) * tile_keys + in_tile;
  const char* const from =
      static_cast<const char*>(mask.data) +
      (index / heads * mask.batch + index % heads * mask.head + key * mask_key) * bytes;
  float bias = 0.f, top = -INFINITY;
  const bool inside = in_tile < tile_keys && key < keys;
  if (inside) {
    const float x = mask_number(mask_bits(from, bytes), dtype);
    // Finite ones stay finite; see kLargestBias.
    const float most = kLargestBias / fmaxf(factor, 1.f);
    bias = fabsf(x) <= FLT_MAX ? fminf(fmaxf(x * unit, -most), most) : x;
    if (bias_bytes == 16) bias = coarse(bias, factor);
    top = bias * factor;
  }
  if (in_tile < tile_keys) {
    unsigned char* const to = packed.tiles + (tile * tile_keys + in_tile) * bias_bytes;
    if (bias_bytes == 16) {
      *reinterpret_cast<uint4*>(to) = split_bias(bias);
    } else {
      *reinterpret_cast<float*>(to) = bias;
    }
  }
  __shared__ float tops[kMostKeys / 32];
#pragma unroll
  for (int i = 16; i > 0; i /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, i));
  if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = top;
  const bool is_seen = __syncthreads_or(inside && bias != -INFINITY);
  const bool is_masked = __syncthreads_or(inside && bias != 0.f);
  const bool is_least = !__syncthreads_or(inside && bias * factor >= -0x1p100f);
  const bool is_ordinary = __syncthreads_or(inside && bias * factor > -0x1p15f);
  if (threadIdx.x > 0) return;
  const float largest = fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3]));
  packed.marks[tile] = (is_seen ? kSeen : 0) | (is_masked ? kMasked : 0) | (is_least ? kLeast : 0) |
                       (is_ordinary ? kOrdinary : 0) | (fabsf(largest) <= 8.f ? kCalm : 0);
  packed.top[tile] = largest;
}

int64_t count_of_masks(const Params& params) {
  return (params.mask.stride[0] != 0 ? params.batch : 1) *
         (params.mask.stride[1] != 0 ? params.q_heads : 1);
}

bool has_rows(const Params& params) { return params.mask.stride[2] != 0 && params.q_length > 1; }

bool heads_share(const Params& params) { return params.mask.stride[1] == 0 || params.q_heads == 1; }

int64_t tiles_of(int64_t count, int tile) { return (count + tile - 1) / tile; }

// For any tiling.
int64_t key_bytes(const Params& params) {
  return count_of_masks(params) * tiles_of(params.kv_length, kLeastKeys) * (kMostKeys * 16 + 5);
}
// Of a mask that heads share, as all are that are packed.
int64_t row_bytes(const Params& params) {
  const int64_t rows = params.q_length + kMostQueries;
  return (params.mask.stride[0] != 0 ? params.batch : 1) * tiles_of(params.kv_length, kLeastKeys) *
         (rows * 16 + tiles_of(rows, 128) * 5);
}

}  // namespace

bool packs_rows(const Params& params) {
  if (params.mask.dtype == FLASHONNX_NONE || !has_rows(params) || params.softcap > 0) return false;
  if (!heads_share(params)) return false;
  if (count_of_masks(params) >= 65536 || params.q_length > int64_t{65535} * 128) return false;
  // A launch takes some µs, and with biases there are two too many.
  const int64_t least = int64_t{1} << (may_be_biased(params) ? 27 : 22);
  return params.batch * params.q_heads * params.q_length >= least / params.kv_length;
}

int64_t packed_mask_bytes(const Params& params) {
  if (params.mask.dtype == FLASHONNX_NONE) return 0;
  if (has_rows(params)) return packs_rows(params) ? row_bytes(params) : 0;
  return key_bytes(params);
}

// A problem of one query has no rows, of a small one they are not packed; and one whose mask has a
// row for each head may become one whose heads share them.
int64_t packed_mask_bound(const Params& params) {
  if (params.mask.dtype == FLASHONNX_NONE) return 0;
  return std::max(key_bytes(params), row_bytes(params));
}

flashonnx_status pack_mask(const Params& params, const Packing& packing, void* workspace,
                           cudaStream_t stream, PackedMask* packed) {
  const Problem p = problem_of(params);
  const bool rows = has_rows(params);
  const int masks = static_cast<int>(count_of_masks(params));
  const int64_t row_tiles = rows ? tiles_of(params.q_length, packing.queries) : 1;
  const int64_t key_tiles = tiles_of(params.kv_length, packing.keys);
  const int64_t tile_bytes = rows ? packing.queries * 16 : packing.keys * packing.bias_bytes;
  packed->tile_count = masks * row_tiles * key_tiles;
  packed->row_tiles = static_cast<int32_t>(row_tiles);
  packed->key_tiles = static_cast<int32_t>(key_tiles);
  packed->tiles = static_cast<unsigned char*>(workspace);
  packed->top = reinterpret_cast<float*>(packed->tiles + packed->tile_count * tile_bytes);
  packed->marks = reinterpret_cast<uint8_t*>(packed->top + packed->tile_count);
  const int heads = params.mask.stride[1] != 0 ? static_cast<int>(params.q_heads) : 1;
  if (!rows) {
    const bool product = packing.bias_bytes != 4;
    const float factor = product ? params.scale * kLog2e : 1.f;
    pack_keys<<<static_cast<unsigned>(packed->tile_count), kMostKeys, 0, stream>>>(
        p.mask, p.mask_key, p.mask_dtype, size_of(p.mask_dtype), heads, p.key_limit, packing.keys,
        packing.bias_bytes, product ? 1.f / params.scale : kLog2e, factor, *packed);
  } else if (may_be_biased(params)) {
    const dim3 grid(packed->key_tiles, packed->row_tiles, masks);
    const uint16_t hides = params.mask.dtype == FLASHONNX_FLOAT16 ? 0xfc00 : 0xff80;
    pack_rows<uint16_t><<<grid, 2 * packing.queries, 0, stream>>>(
        p.mask, hides, heads, p.q_length, p.key_limit, packing.keys, *packed);
  } else {
    const dim3 grid(packed->key_tiles, packed->row_tiles, masks);
    pack_rows<uint8_t><<<grid, 2 * packing.queries, 0, stream>>>(
        p.mask, 0, heads, p.q_length, p.key_limit, packing.keys, *packed);
  }
  return cuda_status(cudaGetLastError(), "sm90: packing of a mask");
}

}  // namespace flashonnx::sm90

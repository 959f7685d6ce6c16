// Flash attention on the CUDA cores: any shape, full float32 products.
//
// Grid: one block per (batch, query head, tile of queries, split of its keys), linear in x and
// continued in y. Block: 128 or 256 threads and 72 to 96 KB of dynamic shared memory (config.h), at
// most 255 registers a thread. A block keeps its queries in shared memory, scores and outputs in
// registers, and walks over the keys its queries see in tiles of 64. A tile is a row of steps: K in
// chunks of features (Q K^T), then V in chunks of keys (P V). Chunks alternate between two slots: a
// step waits for its own chunk, passes one barrier, starts the next chunk into the other slot
// (which everybody left before that barrier) and computes. P goes from lane to lane through shared
// memory: written after the barrier of a tile's last K step, read after that of its first V step.
// Every sum is in a fixed order: same input, same output.
#pragma once

#include "kernels/common/gather.cuh"
#include "kernels/simt/epilogue.cuh"
#include "kernels/simt/load.cuh"
#include "kernels/simt/mask.cuh"
#include "kernels/simt/products.cuh"
#include "kernels/simt/softmax.cuh"

namespace flashonnx::simt {

// kGathered: there is a ragged batch, or there are pages.
template <class T, class C, bool kGathered>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks)
    attention_kernel(const __grid_constant__ Problem p) {
  const int64_t block = int64_t{blockIdx.y} * gridDim.x + blockIdx.x;
  if (block >= p.blocks) return;
  Place place = place_of(p, block, C::kBlockRows);
  if (kGathered && p.ragged.queries) {  // it counts tiles of all sequences
    const Tile tile = find_tile(p.ragged, place.first_query / C::kBlockRows, C::kBlockRows);
    place.batch = tile.sequence, place.first_query = tile.first_query;
  }
  const Sequence sequence =
      kGathered ? sequence_of(p, place.batch)
                : Sequence{0, 0, p.q_length, key_length_of(p, place.batch), p.q_length};
  if (kGathered && (place.first_query < 0 || place.first_query >= sequence.queries)) return;
  const bool paged = kGathered && p.pages.table;
  const Lane<C> lane(threadIdx.x);

  float* const queries = shared_memory();
  float* const slots = queries + C::query_floats(p.head_dim);
  float* const probabilities = slots + 2 * C::kChunk;
  float* const statistics = probabilities + C::kBlockRows * C::kBlockKeys;

  const KeyRange range = key_range(p, sequence.length, sequence.keys);
  const int last_query = min(place.first_query + C::kBlockRows, sequence.queries) - 1;
  const KeySpan span =
      key_span(range, place.first_query, last_query, place.split, p.splits, C::kBlockKeys);
  const int first_key = span.first, end_key = span.end;
  const int warp_first = place.first_query + 32 * lane.warp_row;
  const int warp_last = min(warp_first + 31, last_query);
  // Decoding: a lane's first query is its only one.
  const bool few = last_query - place.first_query < C::kLaneRows;

  const T* const k = static_cast<const T*>(p.k.data) + place.batch * p.k.batch +
                     place.kv_head * p.k.head + sequence.first_key * p.k.row;
  const T* const v = static_cast<const T*>(p.v.data) + place.batch * p.v.batch +
                     place.kv_head * p.v.head + sequence.first_key * p.v.row;
  ChunkLoader<T, C> loader(Widen{p.bfloat16});
  int step = 0;  // its parity tells the slot
  const auto begin_keys = [&](int key, int chunk) {
    const int feature = chunk * C::kKeyFeatures;
    if (paged) {
      loader.template begin<KeyChunk<C>>(
          PagedRows<T>{k + feature, p.pages, place.batch, p.pages.k, p.k.row, key}, end_key - key,
          p.head_dim - feature, p.k_vectors, slots + (step & 1) * C::kChunk);
      return;
    }
    loader.template begin<KeyChunk<C>>(k + key * p.k.row + feature, p.k.row, end_key - key,
                                       p.head_dim - feature, p.k_vectors,
                                       slots + (step & 1) * C::kChunk);
  };
  const auto begin_values = [&](int key) {
    if (paged) {
      loader.template begin<ValueChunk<C>>(
          PagedRows<T>{v, p.pages, place.batch, p.pages.v, p.v.row, key}, end_key - key,
          p.value_dim, p.v_vectors, slots + (step & 1) * C::kChunk);
      return;
    }
    loader.template begin<ValueChunk<C>>(v + key * p.v.row, p.v.row, end_key - key, p.value_dim,
                                         p.v_vectors, slots + (step & 1) * C::kChunk);
  };

  if (first_key < end_key) begin_keys(first_key, 0);
  load_queries<T, C>(static_cast<const T*>(p.q.data) + place.batch * p.q.batch +
                         place.head * p.q.head +
                         (sequence.first_query + place.first_query) * p.q.row,
                     p.q.row, last_query + 1 - place.first_query, p.head_dim, p.scale, p.q_vectors,
                     Widen{p.bfloat16}, queries);

  RowState<C> state;
  const int key_chunks = C::query_chunks(p.head_dim);
  for (int tile = first_key; tile < end_key; tile += C::kBlockKeys) {
    const int tile_end = min(tile + C::kBlockKeys, end_key);
    const bool active = warp_first <= last_query && range.lower(warp_first) < tile_end &&
                        range.upper(warp_last) > tile;
    const bool bounded =
        range.lower(warp_last) > tile || range.upper(warp_first) < tile + C::kBlockKeys;
    // Whether some query of the block does not see some key of the tile.
    const bool masked = p.mask.data || paged || range.lower(last_query) > tile ||
                        range.upper(place.first_query) < tile_end;

    float scores[C::kThreadRows][C::kThreadKeys] = {};
    for (int chunk = 0; chunk < key_chunks; ++chunk) {
      float* const slot = slots + (step++ & 1) * C::kChunk;
      loader.template finish<KeyChunk<C>>(slot, p.k_vectors, false);
      __syncthreads();
      if (chunk + 1 < key_chunks) {
        begin_keys(tile, chunk + 1);
      } else {
        begin_values(tile);
      }
      const int features = min(C::kKeyFeatures, (p.head_dim - chunk * C::kKeyFeatures + 3) / 4 * 4);
      const float* const chunk_queries = queries + chunk * C::kBlockRows * C::kKeyFeatures;
      if (active && few) add_scores<C, 1>(lane, chunk_queries, slot, features, scores);
      if (active && !few)
        add_scores<C, C::kThreadRows>(lane, chunk_queries, slot, features, scores);
    }

    if (active && (p.mask.data || p.softcap > 0.f)) {
      cap_and_mask(p, lane, place.batch, place.head, place.first_query, tile, range.limit,
                   probabilities, scores);
    }
    if (active && bounded) apply_bounds(range, lane, place.first_query, tile, scores);
    if (active && paged) mask_absent(p.pages, lane, place.batch, tile, range.limit, scores);
    softmax(lane, active, masked, statistics, scores, state);
    if (active) store_scores(lane, scores, probabilities);

    for (int key = 0; tile + key < tile_end; key += C::kValueKeys) {
      float* const slot = slots + (step++ & 1) * C::kChunk;
      const bool careful =
          __syncthreads_or(loader.template finish<ValueChunk<C>>(slot, p.v_vectors, masked));
      if (tile + key + C::kValueKeys < tile_end) {
        begin_values(tile + key + C::kValueKeys);
      } else if (tile_end < end_key) {
        begin_keys(tile_end, 0);
      }
      if (!active) continue;
      if (careful) {
        add_values<C, C::kThreadRows, true>(lane, probabilities, slot, key, state.output);
      } else if (few) {
        add_values<C, 1, false>(lane, probabilities, slot, key, state.output);
      } else {
        add_values<C, C::kThreadRows, false>(lane, probabilities, slot, key, state.output);
      }
    }
  }

  reduce_sums(lane, statistics, state);
  finish_rows<T, C, kGathered>(p, place, lane, sequence.first_query, last_query, slots, state);
}

}  // namespace flashonnx::simt

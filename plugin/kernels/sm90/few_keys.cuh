// The kernels of few keys, up to head size 64. All keys are in shared memory at once, so there is
// no ring, no producer, no turn and no schedule: a block is one warpgroup and takes one tile of 64
// queries. Several share a multiprocessor, and what one waits for at its beginning and end lies
// beside the softmax of others.
#pragma once

#include "kernels/common/overlap.cuh"
#include "kernels/sm90/epilogue.cuh"
#include "kernels/sm90/mask.cuh"
#include "kernels/sm90/producer.cuh"

namespace flashonnx::sm90 {

// Of a multiprocessor; each block takes 1 KB more than it asks for.
constexpr int kSharedMemory = 228 * 1024;

// Keys come in tiles of 64: scores take half the registers then. Plain: for up to 128 keys, and
// nothing but Q, K, V and whole vectors of the output.
template <bool kPlain_>
struct FewKeys {
  static constexpr bool kPlain = kPlain_;
  static constexpr int kMostTiles = kPlain ? 2 : 8;
  static constexpr int kBlocks = kPlain ? 5 : 4;  // of a multiprocessor, with up to 128 keys
  static constexpr int kThreads = 128;
  static constexpr int kQueries = 64, kKeys = 64, kDim = 64, kValueDim = 64;  // of a tile
  static constexpr int kScores = kKeys / 2, kOutputs = kValueDim / 2;         // of a thread

  // Shared memory: a tile is one box of the copy engine, of 64 features; some of K and V come two
  // at a time. Biases and barriers of tiles are behind all of them.
  static constexpr int kBox = 64, kBoxRow = kBox * 2, kValueBoxes = 1;
  static constexpr int kBoxKeys = kPlain ? 128 : kKeys;
  static constexpr uint32_t kRowsApart = 8 * kBoxRow / 16, kBoxesApart = kKeys * kBoxRow / 16;
  static constexpr int kAlignment = 1024;
  static constexpr int kQueryBytes = kQueries * kBoxRow;
  static constexpr int kKeyBytes = kKeys * kBoxRow, kValueBytes = kKeyBytes;
  static constexpr int shared_bytes(int tiles) {
    return kAlignment + kQueryBytes + 8 + tiles * (kKeyBytes + kValueBytes + kKeys * 4 + 16);
  }

  // What code that other kernels share asks for, and these are not.
  static constexpr bool kGathered = false, kBiased = false, kGeneral = false, kWeights = false;
  static constexpr bool kBiasProduct = false, kHoldsQueries = false, kLeavesOutHidden = false;
  static constexpr bool kOnes = false, kOnesApart = false, kSumsByProducts = false;
};
static_assert(FewKeys<false>::kBlocks * (FewKeys<false>::shared_bytes(2) + 1024) <= kSharedMemory);
static_assert(FewKeys<true>::kBlocks * (FewKeys<true>::shared_bytes(2) + 1024) <= kSharedMemory);

// What all blocks read of the launch, side by side: a line of parameters that is read for the first
// time takes 70 cycles.
struct FewKeysPlan {
  int32_t key_length, tiles, longest_last;
  Divider group;
  float factor;
};

// Where things stand in a block's shared memory.
template <class C>
class Room {
 public:
  __device__ __forceinline__ Room(unsigned char* unaligned, int tiles)
      : tiles_(C::kPlain ? C::kMostTiles : tiles) {
    const uint32_t address = shared_address(unaligned);
    base_ = (address + C::kAlignment - 1) / C::kAlignment * C::kAlignment;
    memory_ = unaligned + (base_ - address);
  }
  __device__ __forceinline__ int tiles() const { return tiles_; }
  __device__ __forceinline__ uint32_t q() const { return base_; }
  __device__ __forceinline__ uint32_t k(int tile) const {
    return base_ + C::kQueryBytes + tile * C::kKeyBytes;
  }
  __device__ __forceinline__ uint32_t v(int tile) const {
    return k(tiles_) + tile * C::kValueBytes;
  }
  __device__ __forceinline__ float* biases() const {
    return reinterpret_cast<float*>(memory_ + (v(tiles_) - base_));
  }
  // Barriers: full.
  __device__ __forceinline__ uint32_t k_full(int tile) const {
    return v(tiles_) + tiles_ * C::kKeys * 4 + 16 * tile;
  }
  __device__ __forceinline__ uint32_t v_full(int tile) const { return k_full(tile) + 8; }
  __device__ __forceinline__ uint32_t q_full() const { return k_full(tiles_); }

 private:
  unsigned char* memory_;
  uint32_t base_;
  int tiles_;
};

template <class T, class C>
class FewKeysConsumer {
  static constexpr int kWeights = C::kScores / 2;

 public:
  __device__ __forceinline__ FewKeysConsumer(const Problem& p, const Plan& plan,
                                             const FewKeysPlan& few, const Maps& maps,
                                             const Room<C>& room, const Item& item)
      : p_(p), plan_(plan), few_(few), maps_(maps), room_(room), item_(item) {
    lane_.group = 0;  // there is no producer before it
  }

  // What is needed besides Q, K and V comes near, or to shared memory.
  __device__ __forceinline__ void prepare() {
    if (p_.mask.data) {
      for (int key = threadIdx.x; key < room_.tiles() * C::kKeys; key += C::kThreads)
        room_.biases()[key] = bias_of_key(key);
    }
    if (p_.q_bias.data && feature() < p_.head_dim)
      query_bias_ = __ldg(reinterpret_cast<const uint4*>(
          static_cast<const T*>(p_.q_bias.data) + item_.work.head * p_.q_bias.head + feature()));
    if (p_.v_bias.data && threadIdx.x == 0)
      prefetch_line(static_cast<const T*>(p_.v_bias.data) + item_.work.kv_head * p_.v_bias.head);
  }

  // Both halves of the keys, then the only products with V.
  __device__ __forceinline__ void run_plain() {
    RowState state = {{-FLT_MAX, -FLT_MAX}, {0.f, 0.f}};
    uint32_t weights[2][kWeights];
    float output[C::kOutputs];
    const bool both = few_.key_length > C::kKeys;
    barrier_wait(room_.q_full(), 0);
    barrier_wait(room_.k_full(0), 0);
    weigh_alone(0, state, weights[0]);
    if (both) {
      const Raise raise = weigh_alone(1, state, weights[1]);
      if (raise.any) rescale_weights(raise, weights[0]);
    }
    barrier_wait(room_.v_full(0), 0);
    clear(output);
    multiply_values(0, weights[0], output);
    if (both) multiply_values(1, weights[1], output);
    wait_products<0>();
    fence_registers(output);
    float scale[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float sum = quad_sum(state.sum[h]);
      scale[h] = sum == 0.f ? 0.f : __fdividef(1.f, sum);  // 0: all scores are -infinity
    }
    leave(scale, output);
  }

  // Q K^T of a tile beside P V of the one before, from the last to the first.
  __device__ __forceinline__ void run() {
    const int first = item_.span.first_tile, last = item_.span.last_tile;
    RowState state = {{-FLT_MAX, -FLT_MAX}, {0.f, 0.f}};
    float output[C::kOutputs];
    clear(output);
    if (first <= last) {
      uint32_t weights[kWeights];
      barrier_wait(room_.q_full(), 0);
      if (p_.q_bias.data) add_to_queries();
      barrier_wait(room_.k_full(last), 0);
      weigh_alone(last, state, weights);
#pragma unroll 1
      for (int tile = last - 1; tile >= first; --tile) {
        float scores[C::kScores];
        barrier_wait(room_.k_full(tile), 0);
        multiply_keys(tile, scores);
        wait_for_values(tile + 1);
        multiply_values(tile + 1, weights, output);
        wait_products<1>();
        fence_registers(scores);
        const Raise raise = weigh(tile, scores, state);
        fence_registers(scores);
        if (raise.any) pause();  // so that exponentials are not put off until after the wait
        wait_products<0>();
        fence_registers(output);
        if (raise.any) rescale<C>(raise, output);
        pack_scores<T, C>(scores, weights);
      }
      wait_for_values(first);
      multiply_values(first, weights, output);
      wait_products<0>();
      fence_registers(output);
    }
    store(state, output);
  }

 private:
  // In powers of 2.
  __device__ __forceinline__ float bias_of_key(int key) const {
    if (key >= item_.span.range.limit) return 0.f;
    const char* const at = mask_element(p_, plan_, item_.work.batch, item_.work.head, 0, key);
    return mask_bias(mask_bits(at, plan_.mask_bytes), p_.mask_dtype);
  }

  // The first of eight features of queries that this thread adds a bias to.
  __device__ __forceinline__ int feature() const {
    return 8 * (threadIdx.x % 8 ^ threadIdx.x / 8 % 8);  // as the copy engine swizzles
  }
  __device__ __forceinline__ void add_to_queries() const {
    const uint32_t at = room_.q() + threadIdx.x * 16;
#pragma unroll
    for (int i = 0; i < C::kQueryBytes; i += C::kThreads * 16)
      store_shared(at + i, add_elements<T>(load_shared(at + i), query_bias_));
    fence_async();
    __syncthreads();
  }

  __device__ __forceinline__ static Layout layout() { return {C::kRowsApart, C::kBoxesApart}; }

  __device__ __forceinline__ void multiply_keys(int tile, float (&scores)[C::kScores]) const {
    const Descriptor q = described_by_rows<C>(room_.q(), C::kRowsApart).uniform();
    const Descriptor k = described_by_rows<C>(room_.k(tile), C::kRowsApart).uniform();
    sm90::multiply_keys<T, C, false>(q, k, layout(), {}, scores);
  }
  __device__ __forceinline__ void multiply_values(int tile, const uint32_t (&weights)[kWeights],
                                                  float (&output)[C::kOutputs]) const {
    const Descriptor v = described_by_features<C>(room_.v(tile), 0, layout()).uniform();
    sm90::multiply_values<T, C>(weights, v, layout(), {}, output);
  }

  // Rows past a batch entry's length may hold anything: they become zeros.
  __device__ __forceinline__ void wait_for_values(int tile) const {
    barrier_wait(room_.v_full(tile), 0);
    const int limit = item_.span.range.limit;
    if (limit - tile * C::kKeys >= C::kKeys || limit >= p_.key_length) return;
    clear_values<C>(room_.v(tile), layout(), limit - tile * C::kKeys);
    fence_async();
    __syncthreads();
  }

  // P of a tile beside which there is no other product.
  __device__ __forceinline__ Raise weigh_alone(int tile, RowState& state,
                                               uint32_t (&weights)[kWeights]) const {
    float scores[C::kScores];
    multiply_keys(tile, scores);
    wait_products<0>();
    fence_registers(scores);
    const Raise raise = weigh(tile, scores, state);
    pack_scores<T, C>(scores, weights);
    return raise;
  }

  // From scores to P, in place.
  __device__ __forceinline__ Raise weigh(int tile, float (&scores)[C::kScores],
                                         RowState& state) const {
    const int first_key = tile * C::kKeys;
    float factor = few_.factor;
    int end = few_.key_length - first_key;  // of those that the warp sees
    if constexpr (C::kPlain) {
      if (end < C::kKeys) hide_from(end, scores);
    } else {
      if (p_.mask.data) {
        add_key_biases<C>(lane_, factor, 1.f, room_.biases() + first_key, scores);
        factor = 1.f;
      }
      end = apply_structure(first_key, scores);
    }
    const Raise raise = raise_maxima<C>(scores, factor, state);
    exponentiate_before<C>(end, factor, scores, state);
    add_up(row_sums<C>(scores), state);
    return raise;
  }
  __device__ __forceinline__ void hide_from(int end, float (&scores)[C::kScores]) const {
    const uint32_t seen = bits_before(end - 2 * lane_.quad);
#pragma unroll
    for (int i = 0; i < C::kScores; ++i) {
      if (!(seen >> (i / 4 * 2 + i % 2) & 1)) scores[i] = -INFINITY;
    }
  }
  __device__ __forceinline__ int apply_structure(int first_key, float (&scores)[C::kScores]) const {
    const KeyRange& range = item_.span.range;
    const int first_query = item_.work.first_query;
    const int last_query = min(first_query + C::kQueries, p_.q_length) - 1;
    if (first_key >= range.lower(last_query) && first_key + C::kKeys <= range.upper(first_query))
      return C::kKeys;
    apply_bounds<C>(range, lane_, first_query, first_key, ~0u, scores);
    return range.upper(first_query + lane_.warp * 16 + 15) - first_key;
  }

  // P that was packed, by new maxima.
  __device__ __forceinline__ static void rescale_weights(const Raise& raise,
                                                         uint32_t (&weights)[kWeights]) {
    using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
    const uint32_t keep[2] = {pack<T>(raise.keep[0], raise.keep[0]),
                              pack<T>(raise.keep[1], raise.keep[1])};
#pragma unroll
    for (int i = 0; i < kWeights; ++i) {
      Pair& pair = reinterpret_cast<Pair&>(weights[i]);
      pair = __hmul2(pair, reinterpret_cast<const Pair&>(keep[i % 2]));
    }
  }

  __device__ __forceinline__ void store(const RowState& state, float (&output)[C::kOutputs]) const {
    if (p_.v_bias.data) {
      const float sums[2] = {quad_sum(state.sum[0]), quad_sum(state.sum[1])};
      add_value_bias<T, C>(p_, item_.work.kv_head, lane_.quad, sums, output);
    }
    bool careful = false;
    if (p_.mask.data || p_.left >= 0 || p_.right >= 0) careful = holds_nan<C>(output);
    careful = __any_sync(0xffffffffu, careful);
    const Ending ending = end_rows<T, C>(p_, plan_, lane_, item_, careful, state, output);
    if (!ending.slow) return leave(ending.scale, output);
    store_slowly<T, C>(p_, plan_, lane_, item_, ending, output);
  }
  // By the copy engine, from where the queries were.
  __device__ __forceinline__ void leave(const float (&scale)[2],
                                        const float (&output)[C::kOutputs]) const {
    const uint32_t rows = room_.q() + lane_.warp * 16 * C::kBoxRow;
    stage_rows<T, C>(lane_, rows, scale, output);
    if (lane_.lane != 0) return;
    store_box(&maps_.o, rows, 0, item_.work.first_query + lane_.warp * 16, item_.work.head,
              item_.work.batch);
    commit_stores();
    wait_stores_read();
  }

  const Problem& p_;
  const Plan& plan_;
  const FewKeysPlan& few_;
  const Maps& maps_;
  const Room<C>& room_;
  const Item& item_;
  Lane lane_;
  uint4 query_bias_ = {};
};

// Barriers, and all that is to be copied; by one thread.
template <class C>
__device__ __forceinline__ void begin_copies(const Maps& maps, const Room<C>& room,
                                             const Item& item) {
  constexpr int kStep = C::kBoxKeys / C::kKeys;  // tiles
  const Work& work = item.work;
  barrier_init(room.q_full(), 1);
  for (int tile = 0; tile < room.tiles(); tile += kStep)
    barrier_init(room.k_full(tile), 1), barrier_init(room.v_full(tile), 1);
  fence_barrier_init();
  wait_for_predecessor();
  if (item.span.first_tile > item.span.last_tile) return;
  copy_tile<C, C::kQueries, 1>(room.q(), &maps.q, room.q_full(), work.first_query, work.head,
                               work.batch);
  for (int tile = item.span.last_tile; tile >= item.span.first_tile; tile -= kStep) {
    copy_tile<C, C::kBoxKeys, 1>(room.k(tile), &maps.k, room.k_full(tile), tile * C::kKeys,
                                 work.kv_head, work.batch);
    copy_tile<C, C::kBoxKeys, 1>(room.v(tile), &maps.v, room.v_full(tile), tile * C::kKeys,
                                 work.kv_head, work.batch);
  }
  prefetch(&maps.o);
}

template <class T, class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks)
    few_keys_attention(const __grid_constant__ FewKeysPlan few, const __grid_constant__ Maps maps,
                       const __grid_constant__ Problem p, const __grid_constant__ Plan plan) {
  extern __shared__ unsigned char memory[];
  const Room<C> room(memory, few.tiles);
  const int head = blockIdx.y;
  const int tile = few.longest_last ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  Item item;
  item.work = {static_cast<int>(blockIdx.z), head, static_cast<int>(few.group.quotient(head)),
               tile * C::kQueries};
  if constexpr (C::kPlain) {
    item.span.first_tile = item.span.last_tile = 0;  // boxes are two tiles
  } else {
    wait_for_predecessor();  // for lengths
    item.span = span_of<C>(p, item.work);
  }
  if (threadIdx.x == 0) begin_copies<C>(maps, room, item);
  FewKeysConsumer<T, C> consumer(p, plan, few, maps, room, item);
  if constexpr (!C::kPlain) consumer.prepare();
  __syncthreads();
  if constexpr (C::kPlain) {
    consumer.run_plain();
  } else {
    consumer.run();
  }
}

}  // namespace flashonnx::sm90

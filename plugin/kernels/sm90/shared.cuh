// Where things stand in a block's shared memory, and the rings of stages that producer and
// consumers go round.
#pragma once

#include "kernels/sm90/async.cuh"
#include "kernels/sm90/config.h"
#include "kernels/sm90/schedule.h"

namespace flashonnx::sm90 {

// Barriers: for each stage of Q, K, V and the biases, one that says it is full and one
// that says it is free again.
template <class C>
struct Shared {
  unsigned char* memory;
  uint32_t base;

  __device__ __forceinline__ explicit Shared(unsigned char* unaligned) {
    const uint32_t address = shared_address(unaligned);
    base = (address + C::kAlignment - 1) / C::kAlignment * C::kAlignment;
    // So that the compiler knows where it is and how it is aligned; with masks its schedules were
    // worse then (bits at head size 128: 0.96).
    memory = C::kMarks ? unaligned + (base - address)
                       : static_cast<unsigned char*>(__cvta_shared_to_generic(base));
  }

  __device__ __forceinline__ uint32_t q(int stage) const { return base + stage * C::kQueryBytes; }
  __device__ __forceinline__ uint32_t k(int stage) const {
    return base + C::kQueryStages * C::kQueryBytes + stage * C::kKeyBytes;
  }
  __device__ __forceinline__ uint32_t v(int stage) const {
    return k(C::kStages) + stage * C::kValueBytes;
  }
  // Of the tile of queries and the stage's keys.
  __device__ __forceinline__ uint32_t mask(int stage) const {
    return base + C::kMaskAt + stage * C::kMaskBytes;
  }
  // Of a group's queries, for the tile of keys at hand.
  __device__ __forceinline__ uint32_t weights(int group) const {
    return base + C::kWeightsAt + group * C::kWeightBytes;
  }
  // By all threads; `pair` is two of them.
  __device__ __forceinline__ void fill_ones(uint32_t pair) const {
    static_assert(C::kOnesBytes / 8 <= C::kThreads);
    if (threadIdx.x < C::kOnesBytes / 8)
      reinterpret_cast<uint2*>(memory + C::kOnesAt)[threadIdx.x] = {pair, pair};
    fence_async();
  }
  __device__ __forceinline__ float* biases(int stage) const {
    return reinterpret_cast<float*>(memory + C::kBiasAt + stage * C::kKeys * C::kBiasBytes);
  }
  // As operands of a product: 8 features of each key, which are read twice, and as many of Q, which
  // are the same for all queries.
  __device__ __forceinline__ uint32_t bias_rows(int stage) const {
    return base + C::kBiasAt + stage * C::kKeys * C::kBiasBytes;
  }
  __device__ __forceinline__ uint32_t bias_factors() const { return base + C::kFactorsAt; }
  // By all threads; `none`: nobody will bring biases.
  __device__ __forceinline__ void fill_bias_operands(bool none) const {
    constexpr uint32_t kHalf = 0x3f00;  // as bfloat16
    if (C::kBiasProduct && threadIdx.x < 8)
      reinterpret_cast<uint4*>(memory + C::kFactorsAt)[threadIdx.x] = {kHalf << 16 | kHalf, kHalf,
                                                                       0, 0};
    for (int i = threadIdx.x; none && i < C::kStages * C::kKeys; i += C::kThreads)
      reinterpret_cast<uint4*>(memory + C::kBiasAt)[i] = {};
    fence_async();
  }
  // Which of the stage's keys have pages: see mask.cuh.
  __device__ __forceinline__ uint32_t* present(int stage) const {
    return reinterpret_cast<uint32_t*>(memory + C::kBarriersAt + 8 * C::kBarriers) + stage;
  }

  __device__ __forceinline__ ItemOf<C>* item(int stage) const {
    static_assert(sizeof(ItemOf<C>) == C::kItemBytes);
    return reinterpret_cast<ItemOf<C>*>(memory + C::kItemsAt) + stage;
  }

  __device__ __forceinline__ Item* found(int place) const {
    return reinterpret_cast<Item*>(memory + C::kFoundAt) + place;
  }

  // A stage of Q is free when what came of it is stored.
  __device__ __forceinline__ uint32_t q_full(int stage) const { return barrier(2 * stage); }
  __device__ __forceinline__ uint32_t q_free(int stage) const { return barrier(2 * stage + 1); }
  __device__ __forceinline__ uint32_t k_full(int stage) const {
    return q_full(C::kQueryStages + stage);
  }
  __device__ __forceinline__ uint32_t k_free(int stage) const {
    return q_free(C::kQueryStages + stage);
  }
  __device__ __forceinline__ uint32_t v_full(int stage) const { return k_full(C::kStages + stage); }
  __device__ __forceinline__ uint32_t v_free(int stage) const { return k_free(C::kStages + stage); }
  __device__ __forceinline__ uint32_t w_full(int group) const { return v_full(C::kStages + group); }
  __device__ __forceinline__ uint32_t w_free(int group) const { return v_free(C::kStages + group); }
  __device__ __forceinline__ uint32_t found_full(int place) const {
    return w_full((C::kWeights ? C::kGroups : 0) + place);
  }
  __device__ __forceinline__ uint32_t found_free(int place) const {
    return w_free((C::kWeights ? C::kGroups : 0) + place);
  }
  // In place of the last ones where queries get a bias before they are handed on: there is no mask.
  __device__ __forceinline__ uint32_t q_landed(int stage) const {
    static_assert(C::kQueryStages <= 4);
    return barrier(2 * C::kQueryStages + 4 * C::kStages + stage);
  }
  // After all others.
  __device__ __forceinline__ void init_landed_barriers() const {
    for (int stage = 0; stage < C::kQueryStages; ++stage) barrier_init(q_landed(stage), 1);
    fence_barrier_init();
  }
  // By one thread, before any other uses them. Consumers let go of Q by thread, as all read what is
  // to be done with it, of weights too, which all read, and of K and V by warp. `marked`: a warp
  // finds tiles for the producer.
  __device__ __forceinline__ void init_barriers(bool marked) const {
    for (int i = 0; i < C::kBarriers; ++i) {
      const bool queries = i < 2 * C::kQueryStages;
      barrier_init(barrier(i), i % 2     ? C::kGroups * (queries ? 128 : 4)
                               : queries ? C::kQueryArrivals
                                         : 1);
    }
    for (int group = 0; C::kWeights && group < C::kGroups; ++group)
      barrier_init(w_free(group), 128);
    for (int place = 0; marked && place < 2; ++place) {
      barrier_init(found_full(place), 32);
      barrier_init(found_free(place), C::kWeights ? 2 : 1);
    }
    fence_barrier_init();
  }

 private:
  __device__ __forceinline__ uint32_t barrier(int i) const { return base + C::kBarriersAt + 8 * i; }
};

// A tile's rows of V from `first` on become zeros, by a warpgroup.
template <class C>
__device__ __forceinline__ void clear_values(uint32_t tile, const Layout& layout, int first) {
  constexpr int kChunks = C::kBoxRow / 16;
  const uint32_t at = tile + threadIdx.x % kChunks * 16;
  for (int row = first + threadIdx.x % 128 / kChunks; row < C::kKeys; row += 128 / kChunks) {
#pragma unroll
    for (int box = 0; box < C::kValueBoxes; ++box) {
      uint32_t to = at + (box * C::kKeys + row) * C::kBoxRow;
      if constexpr (C::kGathered)
        to = at + (row / 8 * layout.rows + box * layout.box) * 16 + row % 8 * C::kBoxRow;
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
    }
  }
}

// A position in a ring, and how often it has gone round, modulo 2: consumers wait for phase `round`
// of a full barrier, the producer for the phase before of a free one.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t round = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, round ^= 1;
  }
};

// As well, in one register.
template <int kStages>
class PackedRing {
 public:
  __device__ __forceinline__ int stage() const {
    if constexpr (kTwofold) return at_ % kStages;
    return at_ < kStages ? at_ : at_ - kStages;
  }
  // Asked for now and then: what takes several instructions is made anew each time.
  __device__ __forceinline__ int stage_before() const {
    PackedRing ring = *this;
    if (!kTwofold) ring.forget();
    return ring.stage() == 0 ? kStages - 1 : ring.stage() - 1;
  }
  __device__ __forceinline__ uint32_t round() const { return at_ / kStages; }
  // So that the compiler keeps nothing that follows from it in registers.
  __device__ __forceinline__ void forget() { asm volatile("" : "+r"(at_)); }
  __device__ __forceinline__ void advance() {
    ++at_;
    if (kTwofold) at_ %= 2 * kStages;
    if (!kTwofold && at_ == 2 * kStages) at_ = 0;
  }

 private:
  static constexpr bool kTwofold = (kStages & (kStages - 1)) == 0;
  uint32_t at_ = 0;
};

}  // namespace flashonnx::sm90

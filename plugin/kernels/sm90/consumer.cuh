// A consumer warpgroup: 64 queries at a time against all keys that the block's queries may see.
//
// Two products are under way at once: Q K^T of a tile and P V of the tile before. The softmax of
// the tile runs as soon as the first is there, beside the second.
#pragma once

#include "kernels/sm90/epilogue.cuh"
#include "kernels/sm90/mask.cuh"
#include "kernels/sm90/producer.cuh"

namespace flashonnx::sm90 {

template <class T, class C>
class Consumer {
 public:
  __device__ __forceinline__ Consumer(const Problem& p, const Plan& plan, const CUtensorMap& o_map,
                                      const Shared<C>& shared)
      : p_(p), plan_(plan), o_map_(o_map), shared_(shared) {}

  __device__ __forceinline__ void run() {
    if (C::kTurns && lane_.group == C::kGroups - 1) end_turn();  // the first turn is group 0's
    if (!next_item()) return;
    float output[C::kOutputs], scores[C::kScores];
    uint32_t p[C::kScores / 2];
#pragma unroll
    for (int i = 0; i < C::kOutputs; ++i) output[i] = 0.f;
    skip_keys();
    begin_scores(scores);
    wait_products<0>();
    fence_registers(scores);
    RowState state = weigh_first(scores);
    skip_values();
    pack_scores<T, C>(scores, p);
    while (true) {
      walk(scores, p, output, state);
      const int stage = queries_.stage;
      // What is shared is read again and again, which spares registers; what is let go is copied.
      using Done = std::conditional_t<(C::kQueryStages > 1), const Item&, const Item>;
      Done done = item();
      queries_.advance();
      if constexpr (C::kQueryStages > 1) {
        if (!next_item()) {
          begin_last_values(done, last_tile_, p, output);
          end_last_values(output);
          finish_item(done, stage, output, state);
          settle_stores();
          return;
        }
        // The next tile's first products and softmax are made beside this one's last.
        const int done_tile = last_tile_;
        skip_keys();
        begin_scores(scores);
        begin_last_values(done, done_tile, p, output);
        wait_products<1>();
        fence_registers(scores);
        const RowState next = weigh_first(scores);
        hold(scores, next);
        end_last_values(output);
        skip_values();
        finish_item(done, stage, output, state);
        state = next;
      } else {
        // The next queries come to where these are.
        barrier_arrive(shared_.q_free(stage));
        begin_last_values(done, last_tile_, p, output);
        end_last_values(output);
        finish_item(done, stage, output, state);
        if (!next_item()) return;
        skip_keys();
        skip_values();
        begin_scores(scores);
        wait_products<0>();
        fence_registers(scores);
        state = weigh_first(scores);
      }
      pack_scores<T, C>(scores, p);
    }
  }

 private:
  // Waits for the next tile of queries; false if there is none.
  __device__ __forceinline__ bool next_item() {
    barrier_wait(shared_.q_full(queries_.stage), queries_.round);
    if (item().work.batch < 0) return false;
    if (p_.ragged.queries) {
      // The next sequence's queries follow: zeros instead, so that they change nothing.
      const int first = item().work.first_query + lane_.group * 64;
      clear_rows<C::kQueries>(queries(queries_.stage), max(item().queries - first, 0), 64);
    }
    return true;
  }

  // Lets go of the last tile of keys if other groups see it and this one does not. More than one
  // tile cannot be let go of here: the producer would wait for this group to use the values before.
  __device__ __forceinline__ void skip_keys() {
    const Span& span = item().span;
    const int first_query = item().work.first_query + lane_.group * 64;
    const int end = span.range.upper(min(first_query + 63, item().queries - 1));
    const bool skips = span.last_tile > span.first_tile &&
                       (end <= span.last_tile * C::kKeys || first_query >= item().queries);
    last_tile_ = span.last_tile - skips;
    if (!skips) return;
    barrier_wait(shared_.k_full(keys_.stage), keys_.round);
    release(shared_.k_free(keys_.stage));
    keys_.advance();
  }
  __device__ __forceinline__ void skip_values() {
    if (last_tile_ == item().span.last_tile) return;
    barrier_wait(shared_.v_full(values_.stage), values_.round);
    release(shared_.v_free(values_.stage));
    values_.advance();
    begin_turn();
    end_turn();
  }

  // Starts Q K^T of the last tile of keys.
  __device__ __forceinline__ void begin_scores(float (&scores)[C::kScores]) {
    const Descriptor q = described_queries(), k = described_keys();
    barrier_wait(shared_.k_full(keys_.stage), keys_.round);
    multiply_keys<T, C>(q, k, scores);
  }

  // From P of the last tile of keys to P of the first one. Its product with V is left to do.
  __device__ __forceinline__ void walk(float (&scores)[C::kScores], uint32_t (&p)[C::kScores / 2],
                                       float (&output)[C::kOutputs], RowState& state) {
    const Span& span = item().span;
    // Plain tiles, and the values of the tiles after them, need no look at bounds. Never the first
    // tile of the walk: what is left over from the tile of queries before ends there.
    const int first_query = item().work.first_query + lane_.group * 64;
    const int last_query = min(first_query + 63, item().queries - 1);
    const int plain_begin = (span.range.lower(last_query) + C::kKeys - 1) / C::kKeys;
    const int plain_end = min(span.range.upper(first_query) / C::kKeys, last_tile_) - 1;
    const int first_tile = span.first_tile;
    for (int tile = last_tile_ - 1; tile >= first_tile; --tile) {
      const int plain = tile < plain_end ? tile - max(plain_begin, first_tile) + 1 : 0;
      if (plain <= 0) {
        step<Look::kBounds>(tile, scores, p, output, state);
        continue;
      }
      if (!C::kGeneral && item().biased) {
        for (int i = 0; i < plain; ++i) step<Look::kBiases>(tile, scores, p, output, state);
      } else {
        for (int i = 0; i < plain; ++i) step<Look::kNone>(tile, scores, p, output, state);
      }
      tile -= plain - 1;
    }
    settle_stores();
  }

  // What a step has to look at: bounds and biases, biases alone, neither.
  enum class Look { kBounds, kBiases, kNone };

  // One tile of keys: its Q K^T beside P V of the tile before, then its softmax.
  template <Look kLook>
  __device__ __forceinline__ void step(int tile, float (&scores)[C::kScores],
                                       uint32_t (&p)[C::kScores / 2], float (&output)[C::kOutputs],
                                       RowState& state) {
    const Descriptor q = described_queries(), k = described_keys(), v = described_values();
    barrier_wait(shared_.k_full(keys_.stage), keys_.round);
    begin_turn();
    multiply_keys<T, C>(q, k, scores);
    if constexpr (kLook == Look::kBounds) {
      wait_for_values(item().span, tile + 1);
    } else {
      barrier_wait(shared_.v_full(values_.stage), values_.round);
    }
    multiply_values<T, C>(p, v, kLook == Look::kBounds && tile + 1 == last_tile_, output);
    end_turn();
    if constexpr (kLook == Look::kBounds) settle_stores();
    wait_products<1>();
    fence_registers(scores);
    const Raise raise = weigh<kLook>(tile, scores, state);
    hold(scores, state);
    wait_products<0>();
    fence_registers(output);
    release(shared_.v_free(values_.stage));
    values_.advance();
    rescale<C>(raise, output);
    pack_scores<T, C>(scores, p);
  }

  __device__ __forceinline__ void begin_last_values(const Item& item, int last_tile,
                                                    const uint32_t (&p)[C::kScores / 2],
                                                    float (&output)[C::kOutputs]) {
    const Span& span = item.span;
    const Descriptor v = described_values();
    wait_for_values(span, span.first_tile);
    multiply_values<T, C>(p, v, span.first_tile == last_tile, output);
  }
  __device__ __forceinline__ void end_last_values(float (&output)[C::kOutputs]) {
    wait_products<0>();
    fence_registers(output);
    release(shared_.v_free(values_.stage));
    values_.advance();
  }

  // Writes the warp's rows of the output. Where several tiles of queries have their places, the
  // rows leave from where their queries were, and that place is free when they have left.
  __device__ __forceinline__ void finish_item(const Item& item, int stage,
                                              const float (&output)[C::kOutputs],
                                              const RowState& state) {
    const bool may_be_masked = p_.mask.data || p_.left >= 0 || p_.right >= 0 || p_.pages.table;
    bool leaving = false;
    if (may_be_masked && __any_sync(0xffffffffu, holds_nan<C>(output))) {
      attend_carefully<T, C>(p_, plan_, item, first_query_of_warp(item.work), lane_.lane);
    } else {
      const uint32_t rows = queries(stage) + lane_.warp * 16 * C::kBoxRow;
      leaving = finish<T, C>(p_, plan_, o_map_, lane_, item, rows, in_powers_of_2(state), output);
    }
    if constexpr (C::kQueryStages > 1) {
      leaving_ = leaving;
      if (!leaving) barrier_arrive(shared_.q_free(stage));
    }
  }

  __device__ __forceinline__ static RowState in_powers_of_2(RowState state) {
#pragma unroll
    for (int h = 0; C::kGeneral && h < 2; ++h)
      state.maximum[h] = fmaxf(2.f * state.maximum[h], -FLT_MAX);
    return state;
  }

  // Lets go of the place of the queries before these once their rows have left it.
  __device__ __forceinline__ void settle_stores() {
    if (C::kQueryStages == 1 || !leaving_) return;
    if (lane_.lane == 0) wait_stores_read();
    barrier_arrive(shared_.q_free((queries_.stage + C::kQueryStages - 1) % C::kQueryStages));
    leaving_ = false;
  }

  // Scores of the last tile of keys, the first that is met.
  __device__ __forceinline__ RowState weigh_first(float (&scores)[C::kScores]) {
    RowState state = {{-FLT_MAX, -FLT_MAX}, {0.f, 0.f}};
    weigh(last_tile_, scores, state);
    return state;
  }

  // From scores to P, in place. Lets go of the tile of K.
  template <Look kLook = Look::kBounds>
  __device__ __forceinline__ Raise weigh(int tile, float (&scores)[C::kScores], RowState& state) {
    float factor = plan_.factor;
    if constexpr (C::kGeneral) {
      generalise(scores);
      factor = 1.f;
    } else if (kLook != Look::kNone && plan_.mask_per_key &&
               (kLook == Look::kBiases || item().biased) && *shared_.biased(keys_.stage)) {
      add_key_biases<C>(lane_, factor, 1.f, shared_.biases(keys_.stage), scores);
      factor = 1.f;
    }
    release(shared_.k_free(keys_.stage));
    keys_.advance();
    if constexpr (kLook == Look::kBounds) {
      const int first_key = tile * C::kKeys;
      const Item& at = item();
      const int first_query = at.work.first_query + lane_.group * 64;
      const int last_query = min(first_query + 63, at.queries - 1);
      if (first_key < at.span.range.lower(last_query) ||
          first_key + C::kKeys > at.span.range.upper(first_query)) {
        apply_bounds<C>(at.span.range, lane_, at.work.first_query, first_key, scores);
      }
    }
    const Raise raise = raise_maxima<C>(scores, factor, state);
    if constexpr (C::kGeneral) {
      exponentiate_fours<C>(scores, state);
    } else {
      exponentiate<C>(factor, scores, state);
    }
    return raise;
  }

  // Scale, soft cap and mask: scores in powers of 4.
  __device__ __forceinline__ void generalise(float (&scores)[C::kScores]) {
    float factor = plan_.factor / 2;
    if (p_.softcap > 0.f) {
      cap_scores<C>(plan_, scores);
      factor = 1.f;
    }
    const uint32_t tile = shared_.mask(keys_.stage);
    if (plan_.mask_per_key) {
      add_key_biases<C>(lane_, factor, .5f, shared_.biases(keys_.stage), scores);
    } else if (!p_.mask.data) {
#pragma unroll
      for (int i = 0; i < C::kScores; ++i) scores[i] *= factor;
    } else if (plan_.mask_bytes == 1) {
      select_by_bytes<C>(lane_, factor, tile, scores);
    } else {
      add_biases<T, C>(lane_, factor, tile, scores);
    }
  }

  // Keeps exponentials before the wait for the products that they are meant to run beside. Where a
  // fence does not do, as the assembler puts them off all the same, a store does: none is moved
  // across a wait, and this one waits for all of them. Sums are never negative: nothing is stored.
  __device__ __forceinline__ void hold(float (&scores)[C::kScores], const RowState& state) const {
    fence_registers(scores);
    if constexpr (C::kTurns) return;
    asm volatile(
        "{\n"
        ".reg .pred negative;\n"
        "setp.lt.f32 negative, %0, 0f00000000;\n"
        "@negative st.volatile.shared.f32 [%1], %0;\n"
        "}" ::"f"(state.sum[0] + state.sum[1]),
        "r"(shared_.base)
        : "memory");
  }

  // Rows of V between the batch entry's length and the tensor's end may hold anything, as the next
  // sequence's: zeros instead. Each group writes them for itself; they are the same zeros.
  __device__ __forceinline__ void wait_for_values(const Span& span, int tile) {
    barrier_wait(shared_.v_full(values_.stage), values_.round);
    if (span.range.limit >= p_.key_length && !p_.ragged.keys) return;
    clear_rows<C::kKeys>(shared_.v(values_.stage), max(span.range.limit - tile * C::kKeys, 0),
                         C::kKeys);
  }

  // Writes zeros to rows [from, to) of a tile of kRows rows, by the warpgroup.
  template <int kRows>
  __device__ __forceinline__ void clear_rows(uint32_t tile, int from, int to) {
    if (from >= to) return;
    const uint32_t at = tile + threadIdx.x % 128 % (C::kBoxRow / 16) * 16;
    for (int row = from + threadIdx.x % 128 / (C::kBoxRow / 16); row < to;
         row += 128 / (C::kBoxRow / 16)) {
#pragma unroll
      for (int box = 0; box < C::kBoxes; ++box) {
        const uint32_t place = at + (box * kRows + row) * C::kBoxRow;
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(place), "r"(0) : "memory");
      }
    }
    fence_async();
    named_sync(1 + C::kGroups + lane_.group, 128);
  }

  // The warp is done with what the barrier guards.
  __device__ __forceinline__ void release(uint32_t barrier) {
    __syncwarp();
    if (lane_.lane == 0) barrier_arrive(barrier);
  }

  __device__ __forceinline__ void begin_turn() {
    if constexpr (C::kTurns) named_sync(1 + lane_.group, 256);
  }
  __device__ __forceinline__ void end_turn() {
    if constexpr (C::kTurns) named_arrive(1 + (lane_.group + 1) % C::kGroups, 256);
  }

  // The tiles at hand, for products.
  __device__ __forceinline__ Descriptor described_queries() const {
    return described_by_rows<C>(queries(queries_.stage)).uniform();
  }
  __device__ __forceinline__ Descriptor described_keys() const {
    return described_by_rows<C>(shared_.k(keys_.stage)).uniform();
  }
  __device__ __forceinline__ Descriptor described_values() const {
    return described_by_features<C>(shared_.v(values_.stage)).uniform();
  }

  // The tile of queries at hand.
  __device__ __forceinline__ const Item& item() const { return *shared_.item(queries_.stage); }
  __device__ __forceinline__ uint32_t queries(int stage) const {
    return shared_.q(stage) + lane_.group * 64 * C::kBoxRow;
  }
  __device__ __forceinline__ int first_query_of_warp(const Work& work) const {
    return work.first_query + lane_.group * 64 + lane_.warp * 16;
  }

  const Problem& p_;
  const Plan& plan_;
  const CUtensorMap& o_map_;
  const Shared<C>& shared_;
  const Lane lane_;
  int last_tile_;         // of keys that this group sees
  bool leaving_ = false;  // rows wait to leave the place of the queries before these
  Ring<C::kQueryStages> queries_;
  Ring<C::kStages> keys_, values_;
};

}  // namespace flashonnx::sm90

// A consumer warpgroup: 64 queries at a time against all keys that the block's queries may see.
//
// Two products are under way at once: Q K^T of a tile and P V of the tile before. The softmax of
// the tile runs as soon as the first is there, beside the second.
#pragma once

#include "kernels/sm90/epilogue.cuh"
#include "kernels/sm90/general.cuh"
#include "kernels/sm90/producer.cuh"
#include "kernels/sm90/runs.cuh"
#include "kernels/sm90/weights.cuh"

namespace flashonnx::sm90 {

template <class T, class C>
class Consumer {
  using Item = ItemOf<C>;

 public:
  __device__ __forceinline__ Consumer(const Problem& p, const Plan& plan, const CUtensorMap& o_map,
                                      const Shared<C>& shared, const PackedMask* packed,
                                      const Layout* layout = nullptr)
      : p_(p), plan_(plan), o_map_(o_map), shared_(shared), packed_(packed), layout_(layout) {}

  __device__ __forceinline__ void run() {
    if (C::kTurns && lane_.group == C::kGroups - 1) end_turn();  // the first turn is group 0's
    if constexpr (C::kQueryStages > 1) return run_overlapped();
    run_one_by_one();
  }

 private:
  // The next tile's first products and softmax are made beside the last ones of the tile at hand.
  __device__ __forceinline__ void run_overlapped() {
    if (!next_item()) return;
    float output[C::kOutputs], scores[C::kScores];
    uint32_t p[C::kScores / 2];
    skip_keys();
    const uint2 mask = begin_scores(scores);
    wait_products<0>();
    fence_registers(scores);
    RowState state = weigh_first(mask, scores);
    skip_values();
    if constexpr (!C::kSharesSlowEnd) clear(output), make_p<Look::kBounds>(last_tile_, scores, p);
    while (true) {
      if constexpr (C::kSharesSlowEnd) clear(output), pack_scores<T, C>(scores, p);
      walk(scores, p, output, state);
      // What is shared is read again and again, which spares registers.
      const auto done = [&]() -> const Item& { return *shared_.item(queries_.stage_before()); };
      queries_.advance();
      Ending ending;
      if (next_item()) {
        skip_keys();
        const uint2 mask = begin_scores(scores);
        begin_last_values(done(), p, output);
        wait_products<1>();
        fence_registers(scores);
        const RowState next = weigh_first(mask, scores);
        fence_registers(scores);
        end_values(output);
        skip_values();
        if constexpr (!C::kSharesSlowEnd) {
          finish_item(done(), queries_.stage_before(), output, state);
          state = next;
          clear(output), make_p<Look::kBounds>(last_tile_, scores, p);
          continue;
        }
        ending = end_item(done(), output, state);
        state = next;
        if (!ending.slow) {
          leave(done(), queries_.stage_before(), ending, output);
          continue;
        }
      } else {
        begin_last_values(done(), p, output);
        end_values(output);
        if constexpr (!C::kSharesSlowEnd) {
          finish_item(done(), queries_.stage_before(), output, state);
          return settle_stores();
        }
        ending = end_item(done(), output, state);
        if (!ending.slow) {
          leave(done(), queries_.stage_before(), ending, output);
          settle_stores();
          exit_if(item().work.batch < 0);  // it is; so that this stays beside the loop's code
          continue;
        }
      }
      store_slowly<T, C>(p_, plan_, lane_here(), done(), ending, output);
      barrier_arrive(shared_.q_free(queries_.stage_before()));
      if (item().work.batch < 0) return;
    }
  }

  // The next queries, and what is to be done with them, come to where these are.
  __device__ __forceinline__ void run_one_by_one() {
    while (next_item()) {
      float output[C::kOutputs], scores[C::kScores];
      uint32_t p[C::kScores / 2];
      skip_keys();
      skip_values();
      const uint2 mask = begin_scores(scores);
      wait_products<0>();
      fence_registers(scores);
      RowState state = weigh_first(mask, scores);
      clear(output);
      pack_scores<T, C>(scores, p);
      walk(scores, p, output, state);
      const int stage = queries_.stage();
      const Item done = item();
      queries_.advance();
      barrier_arrive(shared_.q_free(stage));
      begin_last_values(done, p, output);
      end_values(output);
      finish_item(done, stage, output, state);
    }
  }

  // Waits for the next tile of queries; false if there is none.
  __device__ __forceinline__ bool next_item() {
    barrier_wait(shared_.q_full(queries_.stage()), queries_.round());
    return item().work.batch >= 0;
  }

  // Lets go of the last tile of keys if other groups see it and this one does not. More than one
  // tile cannot be let go of here: the producer would wait for this group to use the values before.
  __device__ __forceinline__ void skip_keys() {
    const Span& span = item().span;
    const int first_query = item().work.first_query + lane_here().group * 64;
    const int end = span.range.upper(min(first_query + 63, queries_of<C>(p_, item()) - 1));
    const bool skips =
        span.last_tile > span.first_tile &&
        (end <= span.last_tile * C::kKeys || first_query >= queries_of<C>(p_, item()));
    last_tile_ = span.last_tile - (skips ? 1 : 0);
    if (!skips) return;
    if (has_weights<C, Look::kBounds>(item(), span.last_tile)) weights_.skip(shared_, lane_here());
    if constexpr (C::kMarks)
      if (marked()) last_tile_ = last_visible(item().marks.visible, last_tile_, span.first_tile);
    barrier_wait(shared_.k_full(keys_.stage()), keys_.round());
    release(shared_.k_free(keys_.stage()));
    keys_.advance();
  }
  __device__ __forceinline__ void skip_values() {
    if (last_tile_ == item().span.last_tile) return;
    barrier_wait(shared_.v_full(values_.stage()), values_.round());
    release(shared_.v_free(values_.stage()));
    values_.advance();
    begin_turn();
    end_turn();
  }

  // Starts Q K^T of the last tile of keys. Returns what it reads of a mask.
  __device__ __forceinline__ uint2 begin_scores(float (&scores)[C::kScores]) {
    if constexpr (C::kWeights) level_queries<C>(*packed_, item(), lane_, queries(queries_.stage()));
    if constexpr (C::kHoldsQueries)
      hold_queries<C>(queries(queries_.stage()) + lane_.warp * 16 * C::kBoxRow, lane_.lane, held_);
    const auto& q = operand_queries();
    const Descriptor k = described_keys();
    const BiasOperands biases = bias_operands<Look::kBounds>(k);
    const uint2 mask = read_mask<Look::kBounds>(last_tile_);
    barrier_wait(shared_.k_full(keys_.stage()), keys_.round());
    multiply_keys<T, C, C::kBiasProduct>(q, k, layout(), biases, scores);
    return mask;
  }

  // From P of the last tile of keys to P of the first one. Its product with V is left to do.
  __device__ __forceinline__ void walk(float (&scores)[C::kScores], uint32_t (&p)[C::kScores / 2],
                                       float (&output)[C::kOutputs], RowState& state) {
    int tile = last_tile_ - 1;
    while (tile >= item().span.first_tile) {
      const Runs<C> runs = {p_, packed_, has_bits(), shared_, queries_, lane_here(), last_tile_};
      bool biased = C::kGeneral && general().has_row_biases();
      int run = INT_MAX;
      if constexpr (C::kGathered) run = item().misses ? 0 : run;  // pages: no steps for these alone
      if constexpr (C::kMarks)
        if (marked()) run = runs.next_visible(tile, biased);
      int plain = min(runs.plain_tiles(tile), run);
      if constexpr (C::kPackedMasks)
        if (plain > 0) plain = runs.near_tiles(tile, plain, biased, state);
      if (plain <= 0) {
        step<Look::kBounds>(tile--, scores, p, output, state);
        continue;
      }
      const int next = tile - plain;
      if constexpr (C::kPackedMasks)
        if (biased && has_bits()) {
          for (; tile > next; --tile) step<Look::kBits>(tile, scores, p, output, state);
          continue;
        }
      if (biased) {
        for (; tile > next; --tile) step<Look::kBiases>(tile, scores, p, output, state);
      } else {
        for (; tile > next; --tile) step<Look::kNone>(0, scores, p, output, state);
      }
    }
    settle_stores();
  }

  // One tile of keys: its Q K^T beside P V of the tile before, then its softmax.
  template <Look kLook>
  __device__ __forceinline__ void step(int tile, float (&scores)[C::kScores],
                                       uint32_t (&p)[C::kScores / 2], float (&output)[C::kOutputs],
                                       RowState& state) {
    if constexpr ((C::kWeights || (C::kPackedMasks && kLook != Look::kNone)) && C::kGroups == 3)
      queries_.forget();
    const auto& q = operand_queries();
    const Descriptor k = described_keys(), v = described_values();
    const BiasOperands biases = bias_operands<kLook>(k);
    const uint2 mask = read_mask<kLook>(tile);
    barrier_wait(shared_.k_full(keys_.stage()), keys_.round());
    begin_turn();
    multiply_keys<T, C, kMultipliesBiases<kLook>>(q, k, layout(), biases, scores);
    if constexpr (kLook == Look::kBounds) {
      int before = tile + 1;
      if constexpr (C::kMarks)
        if (marked())
          before = first_visible(item().marks.visible, tile + 1, last_of<C>(item(), last_tile_));
      wait_for_values(item().span, before);
    } else {
      barrier_wait(shared_.v_full(values_.stage()), values_.round());
    }
    multiply_values<T, C>(p, v, layout(), described_ones<C>(shared_.base), output);
    constexpr bool kEndsLate = C::kBeforeTurn > 0 && kLook == Look::kNone;
    if constexpr (!kEndsLate) end_turn();
    settle_stores();
    uint32_t pairs[C::kScores / 2];
    general().template read_early<kLook>(lane_, shared_.mask(keys_.stage()), pairs);
    const bool near = stays_near<kLook>(state);
    wait_products<1>();
    fence_registers(scores);
    if (C::kPacksEarly && near) {
      if constexpr (kLook == Look::kBits) hide_by_bits<C>(mask, scores);
      release(shared_.k_free(keys_.stage()));
      keys_.advance();
      const auto end_product = [&] { end_values(output); };
      exponentiate_and_pack<T, C>(plan_.factor, scores, p, output, state, end_product);
      return;
    }
    if constexpr (kEndsLate) exponentiate_before_turn<C>(plan_.factor, scores, state), end_turn();
    const Raise raise = weigh<kLook>(tile, near, mask, pairs, scores, state);
    fence_registers(scores);
    // The assembler puts exponentials off until after the wait for the products that they are meant
    // to run beside, unless something before it hangs on them. The wait is the whole group's.
    if (raise.any) pause();
    end_values(output);
    if (raise.any) rescale<C>(raise, output);
    make_p<kLook>(tile, scores, p);
  }

  // P of a tile, packed and weighed.
  template <Look kLook>
  __device__ __forceinline__ void make_p(int tile, const float (&scores)[C::kScores],
                                         uint32_t (&p)[C::kScores / 2]) {
    pack_scores<T, C>(scores, p);
    if (has_weights<C, kLook>(item(), tile)) weights_.multiply(shared_, lane_here(), p);
  }
  __device__ __forceinline__ void begin_last_values(const Item& item,
                                                    const uint32_t (&p)[C::kScores / 2],
                                                    float (&output)[C::kOutputs]) {
    const Span& span = item.span;
    const Descriptor v = described_values();
    wait_for_values(span, span.first_tile);
    multiply_values<T, C>(p, v, layout(), described_ones<C>(shared_.base), output);
  }
  // Waits for the product with V, and lets go of these.
  __device__ __forceinline__ void end_values(float (&output)[C::kOutputs]) {
    wait_products<0>();
    fence_registers(output);
    release(shared_.v_free(values_.stage()));
    values_.advance();
  }

  // What is written of the warp's rows but the rows themselves.
  __device__ __forceinline__ Ending end_item(const Item& item, float (&output)[C::kOutputs],
                                             const RowState& state) {
    const Problem& p = kShort<C> ? forgotten(p_) : p_;
    bool may_be_masked = p.mask.data || p.left >= 0 || p.right >= 0;
    if (C::kGathered && p_.pages.table) may_be_masked = true;
    bool careful = !C::kGeneral && overflowed(state);
    if (may_be_masked) careful |= holds_nan<C>(output);
    RowState rows = General<T, C>{p, plan_}.in_powers_of_2(state);
    if constexpr (C::kWeights) careful |= !add_tops<C>(*packed_, item, lane_here(), output, rows);
    careful = __any_sync(0xffffffffu, careful);
    return end_rows<T, C>(p_, plan_, lane_here(), item, careful, rows, output);
  }

  __device__ __forceinline__ void finish_item(const Item& item, int stage,
                                              float (&output)[C::kOutputs], const RowState& state) {
    const Ending ending = end_item(item, output, state);
    if (!ending.slow) return leave(item, stage, ending, output);
    store_slowly<T, C>(p_, plan_, lane_here(), item, ending, output);
    if constexpr (C::kQueryStages > 1) barrier_arrive(shared_.q_free(stage));
  }

  // Where several tiles of queries have their places, the rows leave from where their queries were,
  // and that place is free when they have left.
  __device__ __forceinline__ void leave(const Item& item, int stage, const Ending& ending,
                                        const float (&output)[C::kOutputs]) {
    const Lane lane = lane_here();
    const uint32_t rows = queries(stage) + lane.warp * 16 * C::kBoxRow;
    const bool leaving = store_rows<T, C>(p_, o_map_, lane, item, rows, ending.scale, output);
    if constexpr (C::kQueryStages > 1) {
      leaving_ = leaving;
      if (!leaving) barrier_arrive(shared_.q_free(stage));
    }
  }

  // Lets go of the place of the queries before these once their rows have left it.
  __device__ __forceinline__ void settle_stores() {
    if (C::kQueryStages == 1 || !leaving_) return;
    if (lane_.lane == 0) wait_stores_read();
    barrier_arrive(shared_.q_free(queries_.stage_before()));
    leaving_ = false;
  }

  // Scores of the last tile of keys, the first that is met.
  __device__ __forceinline__ RowState weigh_first(const uint2& mask, float (&scores)[C::kScores]) {
    RowState state = {{-FLT_MAX, -FLT_MAX}, {0.f, 0.f}};
    uint32_t pairs[C::kScores / 2];
    general().template read_early<Look::kBounds>(lane_, shared_.mask(keys_.stage()), pairs);
    weigh<Look::kBounds>(last_tile_, false, mask, pairs, scores, state);
    // By bits, rows that are no queries see no key; they shall not keep a group from common steps.
    if (has_bits()) {
      const Lane lane = lane_here();
#pragma unroll
      for (int h = 0; h < 2; ++h)
        if (item().work.first_query + lane.first_row() + 8 * h >= p_.q_length)
          state.maximum[h] = 0.f;
    }
    return state;
  }

  // From scores to P, in place. Lets go of the tile of K. `near`: P may be made first, maxima then.
  template <Look kLook>
  __device__ __forceinline__ Raise weigh(int tile, bool near, const uint2& mask,
                                         const uint32_t (&pairs)[C::kScores / 2],
                                         float (&scores)[C::kScores], RowState& state) {
    float factor = plan_.factor;
    if constexpr (C::kGeneral) {
      factor = general().template unit<kLook>();
      general().template apply<kLook>(lane_here(), shared_.mask(keys_.stage()),
                                      shared_.biases(keys_.stage()), pairs, scores);
    } else if (kLook == Look::kBits || (kLook == Look::kBounds && has_bits())) {
      hide_by_bits<C>(mask, scores);
    }
    const uint32_t there = keys_there();
    release(shared_.k_free(keys_.stage()));
    keys_.advance();
    int end = C::kKeys;
    if constexpr (kLook == Look::kBounds) {
      const int first_key = tile * C::kKeys;
      const Item& at = item();
      const int first_query = at.work.first_query + lane_here().group * 64;
      const int last_query = min(first_query + 63, queries_of<C>(p_, at) - 1);
      if (first_key < at.span.range.lower(last_query) ||
          first_key + C::kKeys > at.span.range.upper(first_query) || ~there != 0) {
        apply_bounds<C>(at.span.range, lane_here(), at.work.first_query, first_key, there, scores);
        end = at.span.range.upper(first_query_of_warp(at.work) + 15) - first_key;
      }
    }
    const Raise raise =
        exponentiate_tile<C, kLook == Look::kBounds>(near, end, factor, scores, state);
    // Sums that tensor cores make are of rounded P: right for what they divide, too coarse for lse.
    if (!C::kWeights && (C::kSumsBound ? !near : !C::kOnes || p_.lse.data))
      add_up(row_sums<C>(scores), state);
    return raise;
  }

  // Whether the mask has bits.
  __device__ __forceinline__ bool has_bits() const {
    return C::kPackedMasks && !plan_.mask_per_key;
  }
  // This thread's bits of a tile's mask.
  template <Look kLook>
  __device__ __forceinline__ uint2 read_mask(int tile) const {
    if constexpr (C::kPackedMasks && kLook != Look::kNone) {
      const int64_t at = int64_t{item().marks.row.index} * packed_->key_tiles + tile;
      if (kLook == Look::kBits || (kLook == Look::kBounds && has_bits()))
        return load_early(packed_->tiles + (at * (2 * C::kQueries) + (threadIdx.x - 128)) * 8);
    }
    return {};
  }
  // Whether scores will not exceed the maxima by much. It was asked before the run (runs.cuh), but
  // with bits, of which groups see a tile less or more.
  template <Look kLook>
  __device__ __forceinline__ bool stays_near(const RowState& state) const {
    if constexpr (kLook == Look::kBits && !C::kPacksEarly)
      return __all_sync(0xffffffffu, is_near(0.f, state));
    if constexpr (kLook == Look::kBounds || C::kGeneral) return false;
    return C::kPackedMasks || C::kWeights || kLook == Look::kNone;
  }
  // Whether biases are a product.
  template <Look kLook>
  static constexpr bool kMultipliesBiases =
      C::kBiasProduct && (kLook == Look::kBounds || kLook == Look::kBiases);

  // The general kernel's part.
  __device__ __forceinline__ General<T, C> general() const { return {p_, plan_}; }

  // Whether tiles of keys have marks.
  __device__ __forceinline__ bool marked() const {
    return C::kPackedMasks || C::kWeights || (C::kGeneral && plan_.mask_per_key);
  }
  // Which keys of the tile have pages. Read by the lane that lets go of them.
  __device__ __forceinline__ uint32_t keys_there() const {
    uint32_t there = ~0u;
    if constexpr (C::kGathered) {
      if (item().misses && lane_.lane == 0) there = *shared_.present(keys_.stage());
      there = __shfl_sync(0xffffffffu, there, 0);
    }
    return there;
  }

  // Rows of V between the batch entry's length and the tensor's end may hold anything: zeros
  // instead. Each group writes them for itself; they are the same zeros.
  __device__ __forceinline__ void wait_for_values(const Span& span, int tile) {
    barrier_wait(shared_.v_full(values_.stage()), values_.round());
    const int limit = max(span.range.limit - tile * C::kKeys, 0);
    if (limit >= C::kKeys || !ends_early<C>(p_, span)) return;
    clear_values<C>(shared_.v(values_.stage()), layout(), limit);
    fence_async();
    named_sync(1 + C::kGroups + lane_.group, 128);
  }

  // The warp is done with what the barrier guards.
  __device__ __forceinline__ void release(uint32_t barrier) {
    __syncwarp();
    if ((kShort<C> ? lane_here() : lane_).lane == 0) barrier_arrive(barrier);
  }

  __device__ __forceinline__ void begin_turn() {
    if constexpr (C::kTurns) named_sync(1 + lane_.group, 256);
  }
  __device__ __forceinline__ void end_turn() {
    if constexpr (C::kTurns) named_arrive(1 + (lane_.group + 1) % C::kGroups, 256);
  }

  // The tiles at hand, for products.
  __device__ __forceinline__ decltype(auto) operand_queries() const {
    if constexpr (C::kHoldsQueries) {
      return (held_);
    } else {
      return described_by_rows<C>(queries(queries_.stage()), C::kRowsApart).uniform();
    }
  }
  __device__ __forceinline__ Descriptor described_keys() const {
    return described_by_rows<C>(shared_.k(keys_.stage()), layout().rows).uniform();
  }
  template <Look kLook>
  __device__ __forceinline__ BiasOperands bias_operands(const Descriptor& keys) const {
    BiasOperands at = {};
    if constexpr (kMultipliesBiases<kLook>) {
      // How far the stage is from the first; known to be the same in all lanes.
      const uint32_t keys_at = keys.lower - described_by_rows<C>(shared_.k(0), layout().rows).lower;
      at = {described_by_halves(shared_.bias_factors(), 0),
            described_by_halves(shared_.bias_rows(0), 128)};
      at.biases.lower += keys_at / (C::kKeyBytes / (C::kKeys * C::kBiasBytes));
    }
    return at;
  }
  __device__ __forceinline__ Descriptor described_values() const {
    return described_by_features<C>(shared_.v(values_.stage()), shared_.base + C::kOnesAt, layout())
        .uniform();
  }
  __device__ __forceinline__ Layout layout() const {
    if constexpr (C::kGathered && C::kBoxes > 1) return *layout_;
    return {C::kRowsApart, C::kBoxesApart};
  }

  // The tile of queries at hand.
  __device__ __forceinline__ const Item& item() const { return *shared_.item(queries_.stage()); }
  __device__ __forceinline__ uint32_t queries(int stage) const {
    return shared_.q(stage) + lane_.group * 64 * C::kBoxRow;
  }
  // Where registers are few, what is not used in every step is not kept in them.
  __device__ __forceinline__ Lane lane_here() const {
    return C::kGroups == 3 ? lane_.anew() : lane_;
  }
  __device__ __forceinline__ int first_query_of_warp(const Work& work) const {
    return work.first_query + lane_.group * 64 + lane_here().warp * 16;
  }

  const Problem& p_;
  const Plan& plan_;
  const CUtensorMap& o_map_;
  const Shared<C>& shared_;
  const PackedMask* const packed_;
  const Layout* const layout_;
  const Lane lane_;
  uint32_t held_[C::kHoldsQueries ? C::kDim / 16 : 1][4];  // queries
  int last_tile_;                                          // of keys that this group sees
  bool leaving_ = false;  // rows wait to leave the place of the queries before these
  PackedRing<C::kQueryStages> queries_;
  PackedRing<C::kStages> keys_, values_;
  Weights<C> weights_;
};

}  // namespace flashonnx::sm90

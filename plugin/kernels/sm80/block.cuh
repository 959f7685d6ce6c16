// Where a block stands in the problem and in shared memory, its copies, and Q K^T.
#pragma once

#include "kernels/sm80/gather.cuh"
#include "kernels/sm80/softmax.cuh"

namespace flashonnx::sm80 {

template <class C>
using QueryFragments = uint32_t[C::kQuerySteps > 0 ? C::kQuerySteps : 1][C::kRowTiles][4];

// 16 features of the warp's queries, from feature 8 d on.
template <class C>
__device__ __forceinline__ void load_queries(uint32_t queries, int d,
                                             uint32_t (&q)[C::kRowTiles][4]) {
  using L = QueryLayout<C>;
#pragma unroll
  for (int r = 0; r < C::kRowTiles; ++r)
    load_matrices(q[r], L::advance(queries, d) + r * 16 * C::kDim * 2);
}

// scores = begin + Q K^T of the warp's rows. `queries` and `keys` are the lane's addresses for
// ldmatrix.
template <class T, class C>
__device__ __forceinline__ void multiply_keys(uint32_t queries, const QueryFragments<C>& held,
                                              uint32_t keys, const float (&begin)[C::kRowTiles][4],
                                              Scores<C>& scores) {
  using L = KeyLayout<C>;
#pragma unroll
  for (int d = 0; d < C::kDimTiles; d += 2) {
    uint32_t loaded[C::kRowTiles][4];
    if (d / 2 >= C::kQuerySteps) load_queries<C>(queries, d, loaded);
    const auto& q = d / 2 < C::kQuerySteps ? held[d / 2] : loaded;
#pragma unroll
    for (int n = 0; n < C::kKeyTiles; n += 2) {
      uint32_t k[4];
      load_matrices(k, L::advance(keys, d) + 2 * n * C::kDim * 2);
#pragma unroll
      for (int r = 0; r < C::kRowTiles; ++r) {
        float (&first)[4] = scores.at[r][n], (&second)[4] = scores.at[r][n + 1];
        if (d == 0) {
          multiply<T>(first, q[r], k[0], k[1], begin[r]);
          multiply<T>(second, q[r], k[2], k[3], begin[r]);
        } else {
          multiply<T>(first, q[r], k[0], k[1], first);
          multiply<T>(second, q[r], k[2], k[3], second);
        }
      }
    }
  }
}

// Where a block's data stands, and which tiles of keys it walks over.
template <class T, class C, Instance kInstance>
struct Block {
  const Problem& p;
  const Plan& plan;
  const Lane lane;
  const Work work;
  const Sequence sequence;
  const uint32_t shared_q, shared_k, shared_v;
  float* const biases;    // of the keys of two tiles
  uint32_t* const flags;  // see careful.cuh
  Slot* const slots;      // of the keys of two tiles, where there are pages
  KeyRange range;
  int first_tile, last_tile;   // first > last: no query sees a key
  int clear_begin, clear_end;  // keys that all queries see
  const T *k, *v;

  // `place`: only of gathered instances.
  __device__ __forceinline__ Block(const Problem& p, const Plan& plan, unsigned char* memory,
                                   const Place* place)
      : p(p),
        plan(plan),
        work(kInstance == kGathered ? place->work : work_of<C>(plan, block_index())),
        sequence(kInstance == kGathered
                     ? place->sequence
                     : Sequence{0, 0, p.q_length, key_length_of(p, work.batch), p.q_length}),
        shared_q(shared_address(memory)),
        shared_k(shared_q + C::kQueryBytes),
        shared_v(shared_k + C::kKeyBytes),
        biases(reinterpret_cast<float*>(memory + C::kQueryBytes + 2 * C::kKeyBytes)),
        flags(reinterpret_cast<uint32_t*>(biases + 2 * C::kBiases)),
        slots(reinterpret_cast<Slot*>(memory + C::kSharedBytes + C::kFlagBytes)) {
    // Q first: the rest is computed while it is on its way.
    const T* q = static_cast<const T*>(p.q.data) + work.batch * p.q.batch + work.head * p.q.head +
                 (sequence.first_query + work.first_query) * p.q.row;
    load_tile<C, QueryLayout<C>, C::kQueries>(
        shared_q, q, p.q.row, sequence.queries - work.first_query, p.head_dim, plan.q_vectors);
    range = key_range(p, sequence.length, sequence.keys);
    const int last_query = min(work.first_query + C::kQueries, sequence.queries) - 1;
    const int begin = range.lower(work.first_query), end = range.upper(last_query);
    clear_begin = range.lower(last_query), clear_end = range.upper(work.first_query);
    first_tile = begin / C::kKeys;
    last_tile = begin < end ? (end - 1) / C::kKeys : first_tile - 1;
    k = static_cast<const T*>(p.k.data) + work.batch * p.k.batch + work.kv_head * p.k.head +
        sequence.first_key * p.k.row;
    v = static_cast<const T*>(p.v.data) + work.batch * p.v.batch + work.kv_head * p.v.head +
        sequence.first_key * p.v.row;
  }

  __device__ __forceinline__ bool paged() const {
    return kInstance == kGathered && p.pages.table != nullptr;
  }
  __device__ __forceinline__ Slot* slots_of(int tile) const { return slots + tile % 2 * C::kKeys; }

  __device__ __forceinline__ void load_keys(int tile) const {
    if (paged()) {
      load_slots<C>(shared_k, k, p.pages.k, p.k.row, slots_of(tile), p.head_dim, plan.k_vectors);
      return;
    }
    const int first = tile * C::kKeys;
    load_tile<C, KeyLayout<C>, C::kKeys>(shared_k, k + first * p.k.row, p.k.row,
                                         range.limit - first, p.head_dim, plan.k_vectors);
  }
  __device__ __forceinline__ void load_values(int tile) const {
    if (paged()) {
      load_slots<C>(shared_v, v, p.pages.v, p.v.row, slots_of(tile), p.value_dim, plan.v_vectors);
      return;
    }
    const int first = tile * C::kKeys;
    load_tile<C, KeyLayout<C>, C::kKeys>(shared_v, v + first * p.v.row, p.v.row,
                                         range.limit - first, p.value_dim, plan.v_vectors);
  }
  // A row of V in global memory, of a key that is there.
  __device__ __forceinline__ const T* value_row(int tile, int key) const {
    if (!paged()) return v + (tile * C::kKeys + key) * p.v.row;
    const Slot slot = slots_of(tile)[key];
    return v + slot.page * p.pages.v + slot.slot * p.v.row;
  }

  // The lane's rows for ldmatrix: two blocks of 8 rows by two chunks. In blocks of keys, row i
  // belongs to run i / 2.
  __device__ __forceinline__ uint32_t lane_q() const {
    return shared_q +
           QueryLayout<C>::offset(lane.warp * C::kWarpQueries + lane.lane % 16, lane.lane / 16);
  }
  __device__ __forceinline__ uint32_t lane_k() const {
    return shared_k + KeyLayout<C>::offset(run_key() + lane.lane / 16 * 2, lane.lane / 8 % 2);
  }
  __device__ __forceinline__ uint32_t lane_v() const {
    return shared_v + KeyLayout<C>::offset(run_key() + lane.lane / 8 % 2 * 2, lane.lane / 16);
  }
  __device__ __forceinline__ int run_key() const {
    return lane.lane % 8 / 2 * C::kRun + lane.lane % 2;
  }
};

}  // namespace flashonnx::sm80

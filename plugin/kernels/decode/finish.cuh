// From sums to outputs: warps are brought together in shared memory, blocks of a cluster in that of
// one another, partitions in the workspace.
//
// Everywhere a part of a row has a maximum m, a sum s and outputs o, all relative to 2^m; parts add
// up as sum 2^(m_i - m) {s_i, o_i} with m the largest of all m_i. The order is fixed, so results
// are the same bits in every run.
#pragma once

#include "kernels/common/finish.cuh"
#include "kernels/common/overlap.cuh"
#include "kernels/decode/cluster.cuh"
#include "kernels/decode/tile.cuh"

namespace flashonnx::decode {

struct Sums {  // of a row
  float maximum = -FLT_MAX, sum = 0.f;
};

// The whole of up to kMost parts, each of which is asked for once, and all at once: part(i) gives
// {maximum, sum} as float2, output(i) four features as float4.
template <int kMost>
struct Weighed {
  Sums total;
  float weight[kMost];

  template <class Part>
  __device__ __forceinline__ Weighed(int count, Part part) {
    float2 x[kMost];
#pragma unroll
    for (int i = 0; i < kMost; ++i) x[i] = i < count ? part(i) : float2{-FLT_MAX, 0.f};
#pragma unroll
    for (int i = 0; i < kMost; ++i) total.maximum = fmaxf(total.maximum, x[i].x);
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      weight[i] = exp2_approximate(x[i].x - total.maximum);
      total.sum = fmaf(weight[i], x[i].y, total.sum);
    }
  }

  template <class Output>
  __device__ __forceinline__ float4 outputs(int count, Output output) const {
    float4 all = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      const float4 x = i < count ? output(i) : float4{0.f, 0.f, 0.f, 0.f};
      all.x = fmaf(weight[i], x.x, all.x), all.y = fmaf(weight[i], x.y, all.y);
      all.z = fmaf(weight[i], x.z, all.z), all.w = fmaf(weight[i], x.w, all.w);
    }
    return all;
  }
};

// A row of the output: where its first feature is, and what its sums are to be multiplied by.
// `token`: the first of a ragged batch's sequence.
struct OutputRow {
  int64_t at;
  float scale;

  __device__ __forceinline__ OutputRow(const Problem& p, const Decode& d, const Rows& rows,
                                       int token, int row, const Sums& sums, bool with_lse) {
    const int head = rows.head(d, row), query = token + rows.query(d, row);
    const int64_t batch = d.first_queries ? 0 : rows.batch;
    if (with_lse && p.lse.data) {
      static_cast<float*>(p.lse.data)[batch * p.lse.batch + head * p.lse.head + query * p.lse.row] =
          natural_lse(p, sums.maximum, sums.sum);
    }
    at = batch * p.o.batch + head * p.o.head + query * p.o.row;
    scale = normaliser(p, head, sums.maximum, sums.sum);
  }
};

// Four features of a row, from `feature` on, and its lse.
template <class T>
__device__ __forceinline__ void store_output(const Problem& p, const Decode& d, const Rows& rows,
                                             int token, int row, int feature, const Sums& sums,
                                             float4 output) {
  const OutputRow out(p, d, rows, token, row, sums, feature == 0);
  if (feature >= p.value_dim) return;
  const int64_t at = out.at + feature;
  const float x[4] = {output.x * out.scale, output.y * out.scale, output.z * out.scale,
                      output.w * out.scale};
  if (d.o_vectors) {
    *reinterpret_cast<uint2*>(static_cast<T*>(p.o.data) + at) = {pack<T>(x[0], x[1]),
                                                                 pack<T>(x[2], x[3])};
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (feature + i < p.value_dim) store_element(p, at + i, x[i]);
  }
}

// The same to the workspace, if other clusters have parts of the row.
template <class T, class C>
__device__ __forceinline__ void store_piece(const Problem& p, const Decode& d, const Work& work,
                                            const Rows& rows, int token, int row, int feature,
                                            const Sums& sums, float4 output) {
  if (d.partitions.divisor == 1) {
    store_output<T>(p, d, rows, token, row, feature, sums, output);
    return;
  }
  const int64_t head = int64_t{work.batch} * d.kv_heads.divisor + work.kv_head;
  const int64_t tile = head * d.row_tiles.divisor + work.row_tile;
  const int64_t at = work.partition * d.all_rows + tile * C::kRows + row;
  if (feature == 0) d.partial_sums[at] = {sums.maximum, sums.sum};
  if (feature < d.partial_dim)
    *reinterpret_cast<float4*>(d.partial_outputs + at * d.partial_dim + feature) = output;
}

// A warp's sums to where the block looks for them.
template <class C>
__device__ __forceinline__ void publish(const Lane& lane, const RowState<C>& state, float* outputs,
                                        float2* sums) {
  float* const ring = outputs + lane.warp * (C::kRingBytes / 4);
  __syncwarp();  // everybody is done with the ring
#pragma unroll
  for (int n = 0; n < C::kRowTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = n * 8 + lane.quad * 2 + e;
      const float sum = reduce_lanes<4>(state.sum[n][e], [](float a, float b) { return a + b; });
      if (lane.column == 0) sums[lane.warp * C::kRows + row] = {state.maximum[n][e], sum};
#pragma unroll
      for (int t = 0; t < C::kSteps; ++t) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          ring[row * C::kOutputRow + t * 16 + h * 8 + lane.column] = state.output[t][n][2 * h + e];
        }
      }
    }
  }
}

// Where everything stands in shared memory.
template <class C>
struct Shared {
  unsigned char* const rings;
  const uint32_t queries;
  float2* const sums;  // [warp][row]
  const uint32_t barrier;
  float4* const received;       // of each block of the cluster, its pieces of this block's share
  float2* const received_sums;  // [block][row]
  __device__ __forceinline__ Shared(unsigned char* memory, int warps)
      : rings(memory),
        queries(sm80::shared_address(memory) + warps * C::kRingBytes),
        sums(reinterpret_cast<float2*>(memory + warps * C::kRingBytes + C::kQueryBytes)),
        barrier(queries + C::kOwnBytes),
        received(reinterpret_cast<float4*>(memory + warps * C::kRingBytes + C::kOwnBytes +
                                           C::kBarrierBytes)),
        received_sums(reinterpret_cast<float2*>(reinterpret_cast<unsigned char*>(received) +
                                                C::kReceivedBytes)) {}
};

// Pieces of 4 features are dealt out to the blocks of a cluster: this many to each, but for the
// last.
template <class C>
__device__ __forceinline__ int pieces_of_block(const Decode& d, const Rows& rows) {
  return static_cast<int>(d.cluster.quotient(rows.count * C::kPieces + d.cluster.divisor - 1));
}

// Tells this block's barrier what it will be sent. One thread calls this.
template <class C>
__device__ __forceinline__ void expect_from_cluster(const Decode& d, const Work& work,
                                                    const Rows& rows, const Shared<C>& shared) {
  const int share = pieces_of_block<C>(d, rows);
  const int mine = max(min(share, rows.count * C::kPieces - work.rank * share), 0);
  expect_bytes(shared.barrier, d.cluster.divisor * (mine * 16 + rows.count * 8));
}

// Everything after the last key, for the whole block. Each block of the cluster sends what it has
// of a piece to its owner.
template <class T, class C>
__device__ __forceinline__ void finish(const Problem& p, const Decode& d, const Work& work,
                                       const Rows& rows, int token, const Shared<C>& shared) {
  const int pieces = rows.count * C::kPieces, blocks = d.cluster.divisor;
  const int share = pieces_of_block<C>(d, rows);
  const float* const outputs = reinterpret_cast<const float*>(shared.rings);
  const bool alone = blocks == 1;
  __syncthreads();
  if (!alone) cluster_wait();  // all barriers are made
  // First the warps' parts of all pieces, then the blocks' of this block's own ones: the same sums.
  int first = 0, count = pieces, parts = d.warps;
  bool last = alone;
  const float2* sums_from = shared.sums;
#pragma unroll 1
  for (;;) {
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
      const int piece = first + i, row = piece / C::kPieces, feature = piece % C::kPieces * 4;
      const auto part = [&](int j) { return sums_from[j * C::kRows + row]; };
      // Of part j, its piece: a warp's row of outputs, or what block j has sent.
      const float4* from = shared.received + i;
      int step = share;
      if (sums_from == shared.sums) {
        from = reinterpret_cast<const float4*>(outputs + row * C::kOutputRow + feature);
        step = C::kRingBytes / 16;
      }
      const Weighed<C::kMaxWarps> all(parts, part);
      const float4 output = all.outputs(parts, [&](int j) { return from[j * step]; });
      if (last) {
        store_piece<T, C>(p, d, work, rows, token, row, feature, all.total, output);
      } else {
        // A row's first pieces' threads tell all blocks its sums as well.
        const int other = feature / 4;
        if (other < blocks) {
          const float2* const to = shared.received_sums + work.rank * C::kRows + row;
          store_remote(remote_address(sm80::shared_address(to), other),
                       float2{all.total.maximum, all.total.sum},
                       remote_address(shared.barrier, other));
        }
        const int owner = piece / share;
        const float4* const to = shared.received + work.rank * share + piece - owner * share;
        store_remote(remote_address(sm80::shared_address(to), owner), output,
                     remote_address(shared.barrier, owner));
      }
    }
    if (last) return;
    wait_for_bytes(shared.barrier);
    first = work.rank * share, count = min(share, pieces - first), parts = blocks;
    last = true;
    sums_from = shared.received_sums;
  }
}

}  // namespace flashonnx::decode

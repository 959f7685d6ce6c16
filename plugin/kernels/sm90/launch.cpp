// Which problems are taken, and by which kernels.
#include "kernels/sm90/launch.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "kernels/common/status.h"
#include "kernels/sm90/config.h"
#include "kernels/sm90/few_keys.h"
#include "kernels/sm90/gathering.h"
#include "kernels/sm90/packed_mask.h"
#include "kernels/sm90/packed_weights.h"
#include "kernels/sm90/tensor_map.h"

namespace flashonnx::sm90 {

namespace {

bool is_present(const flashonnx_tensor& tensor) { return tensor.dtype != FLASHONNX_NONE; }

bool is_gathered(const Params& params) {
  return is_present(params.cu_seqlens_q) || is_present(params.block_table);
}

bool is_aligned(const flashonnx_tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.data) % 16 == 0;
}

// How a problem is done: what kernels take, what workspace they get and what is launched all follow
// from this.
enum class Way { kGathered, kFewKeys, kWeights, kTiles };

Way way_of(const Params& params) {
  if (is_gathered(params)) return Way::kGathered;
  if (has_few_keys(params)) return Way::kFewKeys;
  return is_weighed(params) ? Way::kWeights : Way::kTiles;
}

}  // namespace

const char* refusal(const Params& params) {
  const Rows q_rows = query_rows(params), k_rows = key_rows(params);
  if (!strides_fit(params.q, q_rows.batch, params.q_heads, q_rows.rows) ||
      !strides_fit(params.k, k_rows.batch, params.kv_heads, k_rows.rows) ||
      !strides_fit(params.v, k_rows.batch, params.kv_heads, k_rows.rows)) {
    return "reads rows, heads and batch entries at multiples of 16 bytes";
  }
  if (is_gathered(params) && (params.softcap > 0 || !(params.scale > 0)))
    return "caps no scores of ragged batches and pages";
  if (is_present(params.block_table)) {
    if (params.page_size % 8 != 0) return "does pages of a multiple of 8 slots";
    if (rows_of_page(params, params.k) == 0 || rows_of_page(params, params.v) == 0)
      return "reads pages at multiples of their rows";
    if (is_present(params.mask)) return "takes no mask with pages";
  }
  if (params.mask.dtype != FLASHONNX_NONE && params.mask.stride[2] != 0 && params.q_length > 1) {
    if (size_of(params.mask.dtype) != 1 && params.mask.dtype != params.q.dtype)
      return "takes a mask with a row per query as bytes or in Q's type";
    if (!mask_strides_fit(params.mask, params.batch, params.q_heads, params.q_length))
      return "reads a mask's rows at multiples of 16 bytes, keys side by side";
  }
  // The kernel that packs a mask takes longer than what there is to gain.
  constexpr int64_t kFewKeys = 128;
  if (is_present(params.mask) && params.kv_length <= kFewKeys && !is_gathered(params) &&
      way_of(params) != Way::kFewKeys)
    return "leaves masks of up to 128 keys to kernels that read them as they are";
  // Counted in 32 bits, with the blocks of a round added.
  constexpr int64_t kMostTiles = int64_t{1} << 30;
  const int64_t tiles =
      (q_rows.rows + 63) / 64 + (is_present(params.cu_seqlens_q) ? params.batch : 0);
  if (tiles > kMostTiles / (q_rows.batch * params.q_heads))
    return "deals out up to 2^30 tiles of queries";
  return sm80::refusal(params);
}

// Without a mask, at head size 64. Of K's there is nothing left to do, as softmax does not see what
// is added to all scores of a row; lse and sinks do. Data of unknown address may lie anywhere, and
// then there has to be workspace for sums.
bool adds_biases(const Params& params) {
  const auto known = [](const flashonnx_tensor& tensor) {
    return tensor.data != nullptr && is_aligned(tensor);
  };
  const auto fits = [&](const flashonnx_tensor& bias, int64_t heads) {
    return is_present(bias) && known(bias) && (heads == 1 || bias.stride[1] % 8 == 0);
  };
  if (!known(params.q) || !known(params.k) || !known(params.v)) return false;
  return !is_gathered(params) && !is_present(params.mask) && !is_present(params.lse) &&
         !is_present(params.sinks) && !plan_of(params).all_tiles && params.value_dim == 64 &&
         params.head_dim <= 64 && params.head_dim % 8 == 0 && fits(params.q_bias, params.q_heads) &&
         fits(params.v_bias, params.kv_heads);
}

// The copy engine counts rows in 32 bits.
int64_t rows_of_page(const Params& params, const flashonnx_tensor& tensor) {
  if (params.num_pages <= 1) return params.page_size;
  const int64_t rows = tensor.stride[0] / tensor.stride[2];
  const bool fits = tensor.stride[0] % tensor.stride[2] == 0 && rows >= params.page_size &&
                    rows <= std::numeric_limits<int32_t>::max() / params.num_pages;
  return fits ? rows : 0;
}

Gathering gathering_of(const Params& params, const Plan& plan, int keys, int boxes, Problem* p) {
  const bool ragged = is_present(params.cu_seqlens_q), paged = is_present(params.block_table);
  Gathering gathering = {};
  // A zero stands behind the first numbers of the workspace: see resolve.h.
  const flashonnx_tensor& numbers = ragged ? params.cu_seqlens_q : params.key_lengths;
  gathering.drawn = static_cast<uint32_t*>(numbers.data) + params.batch + (ragged ? 1 : 0);
  gathering.sequences = static_cast<int32_t>(params.batch);
  gathering.part = (gathering.sequences + 31) / 32;
  gathering.rows = Divider(static_cast<uint32_t>(paged ? std::gcd(params.page_size, keys) : keys));
  gathering.layout = {64, static_cast<uint32_t>(keys) * 8};
  if (paged) {
    const int64_t k_page = rows_of_page(params, params.k), v_page = rows_of_page(params, params.v);
    gathering.whole_rows = boxes > 1 && params.head_dim % 64 == 0 && params.value_dim % 64 == 0 &&
                           k_page % 8 == 0 && v_page % 8 == 0;
    if (gathering.whole_rows) {
      gathering.unit_bits = 3;
      gathering.layout = {static_cast<uint32_t>(boxes) * 64, 64};
    }
    gathering.k_page = static_cast<int32_t>(k_page >> gathering.unit_bits);
    gathering.v_page = static_cast<int32_t>(v_page >> gathering.unit_bits);
  }
  // Causal tiles are taken longest first, over as many heads as have room for K and V in half the
  // L2 cache of a large GPU; else those of one key head, so that neighbours share them.
  constexpr int64_t kSectionBytes = int64_t{32} << 20;
  const int64_t length = is_present(params.cu_seqlens_k)
                             ? std::min(params.kv_tokens / params.batch, params.kv_length)
                             : params.kv_length;
  const int64_t bytes = std::max<int64_t>(length * (params.head_dim + params.value_dim) * 2, 1);
  int64_t kv_heads =
      plan.longest_last ? std::clamp<int64_t>(kSectionBytes / bytes, 1, params.kv_heads) : 1;
  while (params.kv_heads % kv_heads != 0) --kv_heads;
  gathering.section = Divider(static_cast<uint32_t>(kv_heads * (params.q_heads / params.kv_heads)));
  if (ragged) {  // one run of tokens
    p->batch_heads = params.q_heads;
    p->q.batch = p->o.batch = p->lse.batch = 0;
  }
  if (paged || is_present(params.cu_seqlens_k)) p->k.batch = p->v.batch = 0;
  return gathering;
}

int64_t workspace(const Params& params) {
  switch (way_of(params)) {
    case Way::kWeights:
      return weights_bytes(params);
    case Way::kTiles:
      return packed_mask_bytes(params);
    default:
      return 0;
  }
}
int64_t workspace_bound(const Params& maxima) {
  const bool taken = maxima.device.arch == 90 && size_of(maxima.q.dtype) == 2;
  if (!taken || is_gathered(maxima)) return 0;
  return std::max(packed_mask_bound(maxima), weights_bound(maxima));
}

namespace {

// At head size 64, whether tiles of 128 queries are done sooner than those of 192. A round of the
// multiprocessors takes a tile's fixed time and the time of its steps, measured on an H200 in
// hundredths of a microsecond. It is shorter by a fifth to a quarter for tiles of 128, with a mask
// by a tenth to a sixth, which pays where that does not take more of them. Causal ones compute less
// that is not needed: 1024 queries in 315 instead of 299 TFLOP/s, 2048 in 397 instead of 427.
bool prefers_short_tiles(const Params& params) {
  if (params.is_causal) return params.q_length <= 1024;
  const int64_t heads = params.batch * params.q_heads, steps = (params.kv_length + 127) / 128;
  const auto time = [&](int64_t queries, int64_t fixed, int64_t step) {
    const int64_t tiles = heads * ((params.q_length + queries - 1) / queries);
    const int64_t rounds = (tiles + params.device.sm_count - 1) / params.device.sm_count;
    return rounds * (fixed + steps * step);
  };
  return is_present(params.mask) ? time(128, 285, 103) < time(192, 282, 123)
                                 : time(128, 176, 95) < time(192, 202, 128);
}

// The dense kernel, that of masks of keys or bits, or the general one: rare ones are those of
// larger heads (docs/kernel_sm90.md says what that costs).
template <class C, class Masked, class General>
flashonnx_status launch_one_of(const Params& params, void* workspace, cudaStream_t stream) {
  const Plan plan = plan_of(params);
  // Biases that are divided by the scale shall stay in the range of float32.
  const bool common = params.scale > 1e-6f && params.scale < 1e6f;
  PackedMask packed = {};
  const auto pack = [&]<class Tiles>(Tiles) {
    return pack_mask(params, {Tiles::kQueries, Tiles::kKeys, Tiles::kBiasBytes}, workspace, stream,
                     &packed);
  };
  if (common && ((plan.mask_per_key && !plan.all_tiles) || packs_rows(params))) {
    FLASHONNX_RETURN_IF_ERROR(pack(Masked()));
    FLASHONNX_RETURN_IF_ERROR(Kernels<Masked>::launch(params, plan, packed, stream));
    return !plan.mask_per_key && may_be_biased(params)
               ? Kernels<General>::launch(params, plan, packed, stream)
               : ok();
  }
  if (!plan.all_tiles && !plan.mask_per_key)
    return Kernels<C>::launch(params, plan, packed, stream);
  if (plan.mask_per_key) FLASHONNX_RETURN_IF_ERROR(pack(General()));
  return Kernels<General>::launch(params, plan, packed, stream);
}

template <class C>
flashonnx_status launch_weighted(const Params& params, void* workspace, cudaStream_t stream) {
  PackedMask packed = {};
  FLASHONNX_RETURN_IF_ERROR(
      pack_weights(params, C::kQueries, C::kKeys, workspace, stream, &packed));
  return Kernels<C>::launch(params, plan_of(params), packed, stream);
}

}  // namespace

flashonnx_status launch(const Params& params, void* workspace, void* stream_) {
  // Selection does not look at data pointers, and without keys there may be none.
  const bool no_keys =
      params.kv_length == 0 || (is_present(params.block_table) && params.num_pages == 0);
  if (!is_aligned(params.q) || !is_aligned(params.k) || !is_aligned(params.v) || no_keys ||
      (!is_aligned(params.mask) && params.mask.stride[2] != 0))
    return sm80::launch(params, workspace, stream_);
  const auto stream = static_cast<cudaStream_t>(stream_);
  const int64_t dim = std::max(params.head_dim, params.value_dim);
  switch (way_of(params)) {
    case Way::kGathered:
      if (dim <= 64) return launch_gathered_64(params, stream);
      return dim <= 128 ? launch_gathered_128(params, stream) : launch_gathered_256(params, stream);
    case Way::kFewKeys:
      return launch_few_keys(params, stream);
    case Way::kWeights:
      return dim <= 64 ? launch_weighted<Weighted64>(params, workspace, stream)
                       : launch_weighted<Weighted128>(params, workspace, stream);
    case Way::kTiles:
      break;
  }
  if (is_present(params.q_bias))
    return Kernels<Biased<Short64>>::launch(params, plan_of(params), PackedMask(), stream);
  const auto launch = [&]<class C, class Masked, class General>(C, Masked, General) {
    return launch_one_of<C, Masked, General>(params, workspace, stream);
  };
  if (dim <= 64) {
    return prefers_short_tiles(params) ? launch(Short64(), MaskedShort64(), General64())
                                       : launch(Tiling64(), Masked64(), General64());
  }
  if (dim <= 96) return launch(Tiling96(), Masked128(), General128());
  if (dim <= 128) return launch(Tiling128(), Masked128(), General128());
  if (dim <= 192) {
    return params.value_dim <= 128 ? launch(Tiling192x128(), Masked192x128(), General256())
                                   : launch(Tiling192(), Masked256(), General256());
  }
  return launch(Tiling256(), Masked256(), General256());
}

}  // namespace flashonnx::sm90

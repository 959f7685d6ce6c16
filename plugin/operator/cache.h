// FlashAttentionKVCache and FlashAttentionVarlen: from a node's shapes to the seam's sizes and
// strides.
#pragma once

#include "operator/geometry.h"

namespace flashonnx {

// The node's inputs, in their order.
struct CacheShapes {
  Shape q, k, v, key_cache, value_cache, cache_lengths, block_table, cu_seqlens_q, cos, sin,
      position_ids, mask, sinks;
};
struct VarlenShapes {
  Shape q, k, v, cu_seqlens_q, cu_seqlens_k, sinks;
};

struct CacheOutputs {
  Shape y, key_cache, value_cache, lse;
};
struct VarlenOutputs {
  Shape y, lse;
};

// As `describe`: check the shapes against each other, fill the sizes, strides and scalars of
// `params`.
flashonnx_status describe_cache(const Attributes& attributes, const CacheShapes& inputs,
                                Sizes sizes, flashonnx_attention_params* params,
                                PackedOffsets* packed, CacheOutputs* outputs);
flashonnx_status describe_varlen(const Attributes& attributes, const VarlenShapes& inputs,
                                 Sizes sizes, flashonnx_attention_params* params,
                                 VarlenOutputs* outputs);

}  // namespace flashonnx

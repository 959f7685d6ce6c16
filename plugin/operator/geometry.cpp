#include "operator/geometry.h"

#include "operator/shapes.h"

namespace flashonnx {
namespace {

flashonnx_status required(const char* name, Layout layout) {
  return make_status(FLASHONNX_INVALID_ARGUMENT,
                     "FlashAttention: input '%s' is expected with qkv_layout \"%s\", got none",
                     name, layout_name(layout));
}

flashonnx_status describe_separate_4d(const Attributes& a, const InputShapes& in, Sizes sizes,
                                      Params* p) {
  const auto& [batch, q_heads, q_length, head_dim, unused] = in.q.dims;
  const auto& k = in.k.dims;
  const auto& v = in.v.dims;
  FLASHONNX_RETURN_IF_ERROR(check_heads("q_num_heads", a.q_num_heads, q_heads));
  FLASHONNX_RETURN_IF_ERROR(check_heads("kv_num_heads", a.kv_num_heads, k[1]));
  FLASHONNX_RETURN_IF_ERROR(check_dim("K", "batch size", batch, k[0], sizes));
  FLASHONNX_RETURN_IF_ERROR(check_dim("K", "head size", head_dim, k[3], sizes));
  FLASHONNX_RETURN_IF_ERROR(check_dim("V", "batch size", batch, v[0], sizes));
  FLASHONNX_RETURN_IF_ERROR(check_dim("V", "heads", k[1], v[1], sizes));
  FLASHONNX_RETURN_IF_ERROR(check_dim("V", "sequence length", k[2], v[2], sizes));
  p->batch = batch;
  p->q_heads = q_heads;
  p->kv_heads = k[1];
  p->q_length = q_length;
  p->kv_length = k[2];
  p->head_dim = head_dim;
  p->value_dim = v[3];
  set_strides(&p->q, bhsd(q_heads, q_length, head_dim));
  set_strides(&p->k, bhsd(k[1], k[2], head_dim));
  set_strides(&p->v, bhsd(k[1], k[2], v[3]));
  set_strides(&p->o, bhsd(q_heads, q_length, v[3]));
  return ok();
}

flashonnx_status describe_separate_3d(const Attributes& a, const InputShapes& in, Sizes sizes,
                                      Params* p) {
  const auto& q = in.q.dims;
  const auto& k = in.k.dims;
  const auto& v = in.v.dims;
  if (a.q_num_heads == 0) return heads_needed("q_num_heads", "3-dimensional inputs");
  if (a.kv_num_heads == 0) return heads_needed("kv_num_heads", "3-dimensional inputs");
  p->batch = q[0];
  p->q_heads = a.q_num_heads;
  p->kv_heads = a.kv_num_heads;
  p->q_length = q[1];
  p->kv_length = k[1];
  FLASHONNX_RETURN_IF_ERROR(split("Q", q[2], p->q_heads, &p->head_dim));
  FLASHONNX_RETURN_IF_ERROR(split("V", v[2], p->kv_heads, &p->value_dim));
  FLASHONNX_RETURN_IF_ERROR(check_dim("K", "batch size", q[0], k[0], sizes));
  FLASHONNX_RETURN_IF_ERROR(
      check_dim("K", "last dimension", p->kv_heads * p->head_dim, k[2], sizes));
  FLASHONNX_RETURN_IF_ERROR(check_dim("V", "batch size", q[0], v[0], sizes));
  FLASHONNX_RETURN_IF_ERROR(check_dim("V", "sequence length", k[1], v[1], sizes));
  set_strides(&p->q, bshd(p->q_heads, p->q_length, p->head_dim));
  set_strides(&p->k, bshd(p->kv_heads, p->kv_length, p->head_dim));
  set_strides(&p->v, bshd(p->kv_heads, p->kv_length, p->value_dim));
  set_strides(&p->o, bshd(p->q_heads, p->q_length, p->value_dim));
  return ok();
}

flashonnx_status describe_separate(const Attributes& a, const InputShapes& in, Sizes sizes,
                                   Params* p) {
  if (!in.k.present) return required("K", a.layout);
  if (!in.v.present) return required("V", a.layout);
  if (in.q.rank != 3 && in.q.rank != 4) return invalid_rank("Q", "3 or 4 dimensions", in.q.rank);
  const char* same = in.q.rank == 3 ? "3 dimensions like 'Q'" : "4 dimensions like 'Q'";
  if (in.k.rank != in.q.rank) return invalid_rank("K", same, in.k.rank);
  if (in.v.rank != in.q.rank) return invalid_rank("V", same, in.v.rank);
  return in.q.rank == 4 ? describe_separate_4d(a, in, sizes, p)
                        : describe_separate_3d(a, in, sizes, p);
}

// Head counts and the head size of projections packed into Q.
flashonnx_status packed_sizes(const Attributes& a, const Shape& q, Params* p) {
  const bool five = q.rank == 5;
  if (a.layout == Layout::k3hd || a.layout == Layout::kH3d) {
    if (!five && q.rank != 3) return invalid_rank("Q", "3 or 5 dimensions", q.rank);
  } else if (q.rank != 3) {
    return invalid_rank("Q", "3 dimensions", q.rank);
  }
  if (five) {
    const size_t three = a.layout == Layout::k3hd ? 2 : 3;
    FLASHONNX_RETURN_IF_ERROR(
        check_dim("Q", three == 2 ? "third dimension" : "fourth dimension", 3, q.dims[three]));
    p->q_heads = q.dims[5 - three];
    p->head_dim = q.dims[4];
    FLASHONNX_RETURN_IF_ERROR(check_heads("q_num_heads", a.q_num_heads, p->q_heads));
  } else {
    if (a.q_num_heads == 0) return heads_needed("q_num_heads", "a packed 3-dimensional 'Q'");
    p->q_heads = a.q_num_heads;
  }
  p->kv_heads = p->q_heads;
  if (a.layout == Layout::kGqa) {
    if (a.kv_num_heads == 0) return heads_needed("kv_num_heads", "qkv_layout \"gqa\"");
    p->kv_heads = a.kv_num_heads;
  }
  FLASHONNX_RETURN_IF_ERROR(check_heads("kv_num_heads", a.kv_num_heads, p->kv_heads));
  if (five) return ok();
  return split("Q", q.dims[2], p->q_heads + 2 * p->kv_heads, &p->head_dim);
}

flashonnx_status describe_packed(const Attributes& a, const InputShapes& in, Params* p,
                                 PackedOffsets* packed) {
  if (in.k.present || in.v.present) {
    return make_status(FLASHONNX_INVALID_ARGUMENT,
                       "FlashAttention: input '%s' is expected to be absent with qkv_layout "
                       "\"%s\" ('Q' holds all three), got one",
                       in.k.present ? "K" : "V", layout_name(a.layout));
  }
  FLASHONNX_RETURN_IF_ERROR(packed_sizes(a, in.q, p));
  const bool time_major = a.layout == Layout::kTimeMajor;
  const int64_t dim = p->head_dim;
  const int64_t row = (p->q_heads + 2 * p->kv_heads) * dim;
  p->batch = in.q.dims[time_major ? 1 : 0];
  p->q_length = p->kv_length = in.q.dims[time_major ? 0 : 1];
  p->value_dim = dim;
  Strides strides = {p->q_length * row, dim, row, 1};
  *packed = {p->q_heads * dim, (p->q_heads + p->kv_heads) * dim};
  if (a.layout == Layout::kH3d) {
    strides[1] = 3 * dim;
    *packed = {dim, 2 * dim};
  }
  Strides out = bshd(p->q_heads, p->q_length, dim);
  if (time_major) {
    strides = {row, dim, p->batch * row, 1};
    out = {p->q_heads * dim, dim, p->batch * p->q_heads * dim, 1};
  }
  set_strides(&p->q, strides);
  set_strides(&p->k, strides);
  set_strides(&p->v, strides);
  set_strides(&p->o, out);
  return ok();
}

// Packed as the projections are, or one behind the other.
flashonnx_status describe_bias(Layout layout, const Shape& bias, Sizes sizes, Params* p,
                               PackedOffsets* packed) {
  const int64_t q = p->q_heads * p->head_dim, k = p->kv_heads * p->head_dim;
  FLASHONNX_RETURN_IF_ERROR(
      check_vector("bias", "size", bias, q + k + p->kv_heads * p->value_dim, sizes));
  const bool separate = layout == Layout::kSeparate;
  packed->k_bias = separate ? q : packed->k;
  packed->v_bias = separate ? q + k : packed->v;
  const int64_t dim = layout == Layout::kH3d ? 3 * p->head_dim : p->head_dim;
  set_strides(&p->q_bias, {0, dim, 0, 1});
  set_strides(&p->k_bias, {0, dim, 0, 1});
  set_strides(&p->v_bias, {0, separate ? p->value_dim : dim, 0, 1});
  return ok();
}

flashonnx_status check_past(const char* name, const Shape& shape, const Params& p, int64_t dim,
                            int64_t length, Sizes sizes) {
  if (shape.rank != 4) return invalid_rank(name, "4 dimensions", shape.rank);
  FLASHONNX_RETURN_IF_ERROR(check_dim(name, "batch size", p.batch, shape.dims[0], sizes));
  FLASHONNX_RETURN_IF_ERROR(check_dim(name, "heads", p.kv_heads, shape.dims[1], sizes));
  FLASHONNX_RETURN_IF_ERROR(check_dim(name, "sequence length", length, shape.dims[2], sizes));
  return check_dim(name, "head size", dim, shape.dims[3], sizes);
}

flashonnx_status describe_past(const InputShapes& in, Sizes sizes, Params* p) {
  if (in.past_key.present != in.past_value.present) {
    const char* got = in.past_key.present ? "past_key" : "past_value";
    return make_status(FLASHONNX_INVALID_ARGUMENT,
                       "FlashAttention: inputs 'past_key' and 'past_value' are expected together, "
                       "got only '%s'",
                       got);
  }
  if (in.past_key.present) {
    p->past_length = in.past_key.rank == 4 ? in.past_key.dims[2] : 0;
    FLASHONNX_RETURN_IF_ERROR(
        check_past("past_key", in.past_key, *p, p->head_dim, p->past_length, sizes));
  }
  if (in.past_value.present) {
    FLASHONNX_RETURN_IF_ERROR(
        check_past("past_value", in.past_value, *p, p->value_dim, p->past_length, sizes));
  }
  set_strides(&p->past_k, bhsd(p->kv_heads, p->past_length, p->head_dim));
  set_strides(&p->past_v, bhsd(p->kv_heads, p->past_length, p->value_dim));
  const int64_t keys = p->past_length + p->kv_length;
  set_strides(&p->present_k, bhsd(p->kv_heads, keys, p->head_dim));
  set_strides(&p->present_v, bhsd(p->kv_heads, keys, p->value_dim));
  p->causal_offset = p->past_length;
  return ok();
}

void describe_outputs(Layout layout, bool four, const Params& p, OutputShapes* out) {
  const int64_t keys = p.past_length + p.kv_length;
  const int64_t hidden = p.q_heads * p.value_dim;
  if (four) {
    out->y = {true, 4, {p.batch, p.q_heads, p.q_length, p.value_dim}};
  } else if (layout == Layout::kTimeMajor) {
    out->y = {true, 3, {p.q_length, p.batch, hidden}};
  } else {
    out->y = {true, 3, {p.batch, p.q_length, hidden}};
  }
  out->present_key = {true, 4, {p.batch, p.kv_heads, keys, p.head_dim}};
  out->present_value = {true, 4, {p.batch, p.kv_heads, keys, p.value_dim}};
  out->lse = {true, 3, {p.batch, p.q_heads, p.q_length}};
}

}  // namespace

flashonnx_status describe(const Attributes& attributes, const InputShapes& in, Sizes sizes,
                          Params* p, PackedOffsets* packed, OutputShapes* outputs) {
  const bool separate = attributes.layout == Layout::kSeparate;
  FLASHONNX_RETURN_IF_ERROR(separate ? describe_separate(attributes, in, sizes, p)
                                     : describe_packed(attributes, in, p, packed));
  FLASHONNX_RETURN_IF_ERROR(describe_bias(attributes.layout, in.bias, sizes, p, packed));
  FLASHONNX_RETURN_IF_ERROR(describe_past(in, sizes, p));
  if (in.mask.present) {
    FLASHONNX_RETURN_IF_ERROR(describe_mask(in.mask, p->past_length + p->kv_length, sizes, p));
  }
  FLASHONNX_RETURN_IF_ERROR(
      check_vector("nonpad_kv_seqlen", "batch size", in.lengths, p->batch, sizes));
  FLASHONNX_RETURN_IF_ERROR(check_vector("sinks", "query heads", in.sinks, p->q_heads, sizes));
  p->key_lengths.stride[0] = 1;
  p->sinks.stride[0] = 1;
  p->offset_from_lengths = in.lengths.present ? 1 : 0;
  set_strides(&p->lse, {p->q_heads * p->q_length, p->q_length, 1, 1});
  p->is_causal = static_cast<int32_t>(attributes.is_causal);
  p->window_left = attributes.left_window_size;
  p->window_right = attributes.right_window_size;
  p->scale = attributes.scale;
  p->softcap = attributes.softcap;
  p->empty_row = attributes.empty_row;
  describe_outputs(attributes.layout, separate && in.q.rank == 4, *p, outputs);
  return ok();
}

}  // namespace flashonnx

#include "operator/cache.h"

#include "operator/shapes.h"

namespace flashonnx {
namespace {

// Q, K, V or Y: rows of heads. Packed tokens are one batch entry.
struct Tokens {
  int64_t batch, heads, length, dim;
};

// How all of a node's tokens are laid out.
struct Form {
  bool ragged;  // packed tokens (T, H*D) or (T, H, D); else (B, S, H*D) or (B, H, S, D)
  bool ranked;  // with a dimension of heads

  size_t rank() const { return (ragged ? 2 : 3) + (ranked ? 1 : 0); }

  Strides strides(const Tokens& x) const {
    if (ragged) return {0, x.dim, x.heads * x.dim, 1};
    return ranked ? bhsd(x.heads, x.length, x.dim) : bshd(x.heads, x.length, x.dim);
  }

  Shape shape(const Tokens& x) const {
    if (ragged && ranked) return {true, 3, {x.length, x.heads, x.dim}};
    if (ragged) return {true, 2, {x.length, x.heads * x.dim}};
    if (ranked) return {true, 4, {x.batch, x.heads, x.length, x.dim}};
    return {true, 3, {x.batch, x.length, x.heads * x.dim}};
  }
};

flashonnx_status form_of(const Shape& q, bool ragged, Form* form) {
  const size_t flat = ragged ? 2 : 3;
  if (q.rank != flat && q.rank != flat + 1) {
    return invalid_rank("Q", ragged ? "2 or 3 dimensions with 'cu_seqlens_q'" : "3 or 4 dimensions",
                        q.rank);
  }
  *form = {ragged, q.rank == flat + 1};
  return ok();
}

// `heads`: as the attribute says, or 0; they must be known where the shape has none.
flashonnx_status read_tokens(const char* name, const char* attribute, const Shape& shape,
                             int64_t heads, const Form& form, Tokens* x) {
  if (shape.rank != form.rank()) {
    constexpr const char* kRanks[] = {"2 dimensions like 'Q'", "3 dimensions like 'Q'",
                                      "4 dimensions like 'Q'"};
    return invalid_rank(name, kRanks[form.rank() - 2], shape.rank);
  }
  const auto& dims = shape.dims;
  x->batch = form.ragged ? 1 : dims[0];
  if (form.ranked) {
    x->heads = dims[1];
    x->length = dims[form.ragged ? 0 : 2];
    x->dim = dims[form.ragged ? 2 : 3];
    return check_heads(attribute, heads, x->heads);
  }
  if (heads == 0) return heads_needed(attribute, "inputs without a dimension of heads");
  x->heads = heads;
  x->length = dims[form.ragged ? 0 : 1];
  return split(name, dims[form.ragged ? 1 : 2], heads, &x->dim);
}

flashonnx_status check_together(const char* a_name, const Shape& a, const char* b_name,
                                const Shape& b) {
  if (a.present == b.present) return ok();
  return make_status(FLASHONNX_INVALID_ARGUMENT,
                     "FlashAttention: inputs '%s' and '%s' are expected together, got only '%s'",
                     a_name, b_name, a.present ? a_name : b_name);
}

flashonnx_status check_rank(const char* name, const Shape& shape, size_t rank) {
  constexpr const char* kRanks[] = {"0 dimensions", "1 dimension", "2 dimensions", "3 dimensions",
                                    "4 dimensions"};
  return shape.rank == rank ? ok() : invalid_rank(name, kRanks[rank], shape.rank);
}

// One of the caches, against the other and the batch. Fills heads, size and capacity.
flashonnx_status read_cache(const char* name, const Shape& cache, const Shape& key_cache,
                            bool paged, Sizes sizes, int64_t* dim) {
  FLASHONNX_RETURN_IF_ERROR(check_rank(name, cache, 4));
  constexpr const char* kPaged[] = {"pages", "page size", "heads"};
  constexpr const char* kDense[] = {"batch size", "heads", "capacity"};
  for (size_t i = 0; i < 3; ++i) {
    FLASHONNX_RETURN_IF_ERROR(
        check_dim(name, paged ? kPaged[i] : kDense[i], key_cache.dims[i], cache.dims[i], sizes));
  }
  *dim = cache.dims[3];
  if (*dim > 0) return ok();
  return make_status(
      FLASHONNX_INVALID_ARGUMENT,
      "FlashAttention: input '%s' is expected to have a positive head size, got %lld", name,
      number(*dim));
}

void set_cache_strides(const Params& p, int64_t dim, flashonnx_tensor* cache,
                       flashonnx_tensor* present) {
  const bool paged = p.page_size > 0;
  const Strides strides =
      paged ? bshd(p.kv_heads, p.page_size, dim) : bhsd(p.kv_heads, p.cache_capacity, dim);
  set_strides(cache, strides);
  set_strides(present, strides);
}

flashonnx_status describe_caches(const CacheShapes& in, Sizes sizes, Params* p) {
  const bool paged = in.block_table.present;
  FLASHONNX_RETURN_IF_ERROR(
      read_cache("key_cache", in.key_cache, in.key_cache, paged, sizes, &p->head_dim));
  FLASHONNX_RETURN_IF_ERROR(
      read_cache("value_cache", in.value_cache, in.key_cache, paged, sizes, &p->value_dim));
  const auto& dims = in.key_cache.dims;
  if (!paged) {
    FLASHONNX_RETURN_IF_ERROR(check_dim("key_cache", "batch size", p->batch, dims[0], sizes));
    p->kv_heads = dims[1];
    p->cache_capacity = dims[2];
  } else {
    FLASHONNX_RETURN_IF_ERROR(check_rank("block_table", in.block_table, 2));
    FLASHONNX_RETURN_IF_ERROR(
        check_dim("block_table", "batch size", p->batch, in.block_table.dims[0], sizes));
    p->num_pages = dims[0];
    p->page_size = dims[1];
    p->kv_heads = dims[2];
    p->cache_capacity = p->page_size * in.block_table.dims[1];
    p->block_table.stride[0] = in.block_table.dims[1];
    p->block_table.stride[1] = 1;
  }
  set_cache_strides(*p, p->head_dim, &p->cache_k, &p->present_k);
  set_cache_strides(*p, p->value_dim, &p->cache_v, &p->present_v);
  return ok();
}

// With qkv_layout "gqa" a row of Q holds the heads of Q, of K and of V.
flashonnx_status check_packed(const Attributes& a, const CacheShapes& in, const Form& form) {
  if (a.layout != Layout::kGqa) {
    return make_status(FLASHONNX_INVALID_ARGUMENT,
                       "FlashAttention: attribute 'qkv_layout' is expected to be \"separate\" or "
                       "\"gqa\" with a cache, got \"%s\"",
                       layout_name(a.layout));
  }
  if (in.k.present || in.v.present) {
    return make_status(FLASHONNX_INVALID_ARGUMENT,
                       "FlashAttention: input '%s' is expected to be absent with qkv_layout "
                       "\"gqa\" ('Q' holds all three), got one",
                       in.k.present ? "K" : "V");
  }
  if (form.ranked)
    return invalid_rank("Q",
                        form.ragged ? "2 dimensions with qkv_layout \"gqa\""
                                    : "3 dimensions with qkv_layout \"gqa\"",
                        in.q.rank);
  return a.q_num_heads > 0 ? ok() : heads_needed("q_num_heads", "qkv_layout \"gqa\"");
}

// Q, K and V of a packed Q, which `q` describes as one head: `q` becomes Q alone.
flashonnx_status describe_packed(const Attributes& a, const Form& form, Sizes sizes, Tokens* q,
                                 Params* p, PackedOffsets* packed) {
  const int64_t row = q->dim;
  *packed = {a.q_num_heads * p->head_dim, (a.q_num_heads + p->kv_heads) * p->head_dim};
  FLASHONNX_RETURN_IF_ERROR(
      check_dim("Q", "last dimension", packed->v + p->kv_heads * p->value_dim, row, sizes));
  q->heads = a.q_num_heads;
  q->dim = p->head_dim;
  const int64_t batch = form.ragged ? 0 : q->length * row;
  set_strides(&p->q, {batch, p->head_dim, row, 1});
  set_strides(&p->k, {batch, p->head_dim, row, 1});
  set_strides(&p->v, {batch, p->value_dim, row, 1});
  return ok();
}

flashonnx_status describe_new_keys(const Attributes& a, const CacheShapes& in, const Form& form,
                                   Sizes sizes, const Tokens& q, Params* p) {
  const struct {
    const char* name;
    const Shape& shape;
    int64_t dim;
    flashonnx_tensor* tensor;
  } kNew[] = {{"K", in.k, p->head_dim, &p->k}, {"V", in.v, p->value_dim, &p->v}};
  FLASHONNX_RETURN_IF_ERROR(check_heads("kv_num_heads", a.kv_num_heads, p->kv_heads));
  FLASHONNX_RETURN_IF_ERROR(check_together("K", in.k, "V", in.v));
  for (const auto& [name, shape, dim, tensor] : kNew) {
    if (!shape.present) continue;
    Tokens x;
    FLASHONNX_RETURN_IF_ERROR(read_tokens(name, "kv_num_heads", shape, p->kv_heads, form, &x));
    FLASHONNX_RETURN_IF_ERROR(check_dim(name, "batch size", q.batch, x.batch, sizes));
    FLASHONNX_RETURN_IF_ERROR(check_dim(name, "sequence length", q.length, x.length, sizes));
    FLASHONNX_RETURN_IF_ERROR(check_dim(name, "head size", dim, x.dim, sizes));
    set_strides(tensor, form.strides(x));
  }
  p->kv_length = in.k.present || a.layout != Layout::kSeparate ? p->q_length : 0;
  return ok();
}

flashonnx_status describe_rotary(const Attributes& a, const CacheShapes& in, const Form& form,
                                 Sizes sizes, const Tokens& q, Params* p) {
  FLASHONNX_RETURN_IF_ERROR(check_together("cos_cache", in.cos, "sin_cache", in.sin));
  if (!in.cos.present) {
    if (in.position_ids.present) {
      return make_status(FLASHONNX_INVALID_ARGUMENT,
                         "FlashAttention: input 'position_ids' is expected to be absent without "
                         "'cos_cache', got one");
    }
    if (a.rotary_dim == 0) return ok();
    return make_status(FLASHONNX_INVALID_ARGUMENT,
                       "FlashAttention: attribute 'rotary_dim' is expected to be 0 without "
                       "'cos_cache', got %lld",
                       number(a.rotary_dim));
  }
  FLASHONNX_RETURN_IF_ERROR(check_rank("cos_cache", in.cos, 2));
  FLASHONNX_RETURN_IF_ERROR(check_rank("sin_cache", in.sin, 2));
  FLASHONNX_RETURN_IF_ERROR(
      check_dim("sin_cache", "positions", in.cos.dims[0], in.sin.dims[0], sizes));
  FLASHONNX_RETURN_IF_ERROR(check_dim("sin_cache", "width", in.cos.dims[1], in.sin.dims[1], sizes));
  p->rotary_length = in.cos.dims[0];
  p->rotary_dim = a.rotary_dim > 0 ? a.rotary_dim : 2 * in.cos.dims[1];
  p->rotary_interleaved = static_cast<int32_t>(a.rotary_interleaved);
  if (p->rotary_dim == 0 || p->rotary_dim > 2 * in.cos.dims[1]) {
    return make_status(FLASHONNX_INVALID_ARGUMENT,
                       "FlashAttention: input 'cos_cache' is expected to have a width of at least "
                       "%lld (half of rotary_dim), got %lld",
                       number(std::max<int64_t>(p->rotary_dim / 2, 1)), number(in.cos.dims[1]));
  }
  for (flashonnx_tensor* table : {&p->rotary_cos, &p->rotary_sin})
    set_strides(table, {in.cos.dims[1], 1, 0, 0});
  if (!in.position_ids.present) return ok();
  FLASHONNX_RETURN_IF_ERROR(check_rank("position_ids", in.position_ids, form.ragged ? 1 : 2));
  if (form.ragged) {
    set_strides(&p->rotary_positions, {0, 1, 0, 0});
    return check_dim("position_ids", "tokens", q.length, in.position_ids.dims[0], sizes);
  }
  const auto& dims = in.position_ids.dims;
  if (dims[0] != 1)  // one row of them serves every batch entry
    FLASHONNX_RETURN_IF_ERROR(
        check_dim("position_ids", "batch size (or 1)", q.batch, dims[0], sizes));
  set_strides(&p->rotary_positions, {dims[0] == 1 ? 0 : q.length, 1, 0, 0});
  return check_dim("position_ids", "sequence length", q.length, dims[1], sizes);
}

void describe_rows(const Attributes& a, const Form& form, const Tokens& q, Params* p) {
  const Tokens o{q.batch, q.heads, q.length, p->value_dim};
  set_strides(&p->o, form.strides(o));
  set_strides(&p->lse, form.ragged ? Strides{0, q.length, 1, 0}
                                   : Strides{q.heads * q.length, q.length, 1, 0});
  p->q_heads = q.heads;
  p->q_length = q.length;
  if (form.ragged) {
    p->q_tokens = q.length;
    if (a.max_q_length > 0) p->q_length = std::min(a.max_q_length, q.length);
  }
  p->sinks.stride[0] = 1;
  p->is_causal = static_cast<int32_t>(a.is_causal);
  p->window_left = a.left_window_size;
  p->window_right = a.right_window_size;
  p->scale = a.scale;
  p->softcap = a.softcap;
  p->fixed_split = a.fixed_split;
}

Shape lse_shape(const Form& form, const Tokens& q) {
  if (form.ragged) return {true, 2, {q.heads, q.length}};
  return {true, 3, {q.batch, q.heads, q.length}};
}

// Sequences of a vector of B + 1 cumulated lengths.
flashonnx_status count_sequences(const char* name, const Shape& shape, int64_t* batch) {
  FLASHONNX_RETURN_IF_ERROR(check_rank(name, shape, 1));
  *batch = shape.dims[0] - 1;
  if (*batch >= 0) return ok();
  return make_status(FLASHONNX_INVALID_ARGUMENT,
                     "FlashAttention: input '%s' is expected to have at least 1 element, got 0",
                     name);
}

}  // namespace

flashonnx_status describe_cache(const Attributes& a, const CacheShapes& in, Sizes sizes, Params* p,
                                PackedOffsets* packed, CacheOutputs* outputs) {
  Form form;
  Tokens q;
  const bool separate = a.layout == Layout::kSeparate;
  FLASHONNX_RETURN_IF_ERROR(form_of(in.q, in.cu_seqlens_q.present, &form));
  if (!separate) FLASHONNX_RETURN_IF_ERROR(check_packed(a, in, form));
  const int64_t heads = separate ? a.q_num_heads : 1;
  FLASHONNX_RETURN_IF_ERROR(read_tokens("Q", "q_num_heads", in.q, heads, form, &q));
  p->batch = q.batch;
  if (form.ragged) {
    FLASHONNX_RETURN_IF_ERROR(count_sequences("cu_seqlens_q", in.cu_seqlens_q, &p->batch));
    p->cu_seqlens_q.stride[0] = 1;
  }
  FLASHONNX_RETURN_IF_ERROR(describe_caches(in, sizes, p));
  if (separate) {
    FLASHONNX_RETURN_IF_ERROR(check_dim("Q", "head size", p->head_dim, q.dim, sizes));
    set_strides(&p->q, form.strides(q));
  } else {
    FLASHONNX_RETURN_IF_ERROR(describe_packed(a, form, sizes, &q, p, packed));
  }
  describe_rows(a, form, q, p);
  FLASHONNX_RETURN_IF_ERROR(describe_new_keys(a, in, form, sizes, q, p));
  FLASHONNX_RETURN_IF_ERROR(describe_rotary(a, in, form, sizes, q, p));
  // (B), or with trailing dimensions of 1, as decoders make them
  Shape lengths = in.cache_lengths;
  while (lengths.rank > 1 && lengths.rank <= kMaxRank && lengths.dims[lengths.rank - 1] == 1)
    --lengths.rank;
  FLASHONNX_RETURN_IF_ERROR(check_vector("cache_lengths", "batch size", lengths, p->batch, sizes));
  p->cache_lengths.stride[0] = 1;
  if (in.mask.present) {
    if (form.ragged) {
      return make_status(FLASHONNX_INVALID_ARGUMENT,
                         "FlashAttention: input 'attn_mask' is expected to be absent with "
                         "'cu_seqlens_q', got one");
    }
    FLASHONNX_RETURN_IF_ERROR(describe_mask(in.mask, p->cache_capacity, sizes, p));
  }
  FLASHONNX_RETURN_IF_ERROR(check_vector("sinks", "query heads", in.sinks, p->q_heads, sizes));
  *outputs = {form.shape({q.batch, q.heads, q.length, p->value_dim}), in.key_cache, in.value_cache,
              lse_shape(form, q)};
  return ok();
}

flashonnx_status describe_varlen(const Attributes& a, const VarlenShapes& in, Sizes sizes,
                                 Params* p, VarlenOutputs* outputs) {
  Form form;
  Tokens q, k, v;
  FLASHONNX_RETURN_IF_ERROR(form_of(in.q, true, &form));
  FLASHONNX_RETURN_IF_ERROR(read_tokens("Q", "q_num_heads", in.q, a.q_num_heads, form, &q));
  FLASHONNX_RETURN_IF_ERROR(read_tokens("K", "kv_num_heads", in.k, a.kv_num_heads, form, &k));
  FLASHONNX_RETURN_IF_ERROR(read_tokens("V", "kv_num_heads", in.v, a.kv_num_heads, form, &v));
  FLASHONNX_RETURN_IF_ERROR(check_dim("K", "head size", q.dim, k.dim, sizes));
  FLASHONNX_RETURN_IF_ERROR(check_dim("V", "heads", k.heads, v.heads, sizes));
  FLASHONNX_RETURN_IF_ERROR(check_dim("V", "tokens", k.length, v.length, sizes));
  FLASHONNX_RETURN_IF_ERROR(count_sequences("cu_seqlens_q", in.cu_seqlens_q, &p->batch));
  if (in.cu_seqlens_k.present) {
    FLASHONNX_RETURN_IF_ERROR(check_vector("cu_seqlens_k", "length (that of 'cu_seqlens_q')",
                                           in.cu_seqlens_k, p->batch + 1, sizes));
  }
  FLASHONNX_RETURN_IF_ERROR(check_vector("sinks", "query heads", in.sinks, q.heads, sizes));
  p->kv_heads = k.heads;
  p->head_dim = q.dim;
  p->value_dim = v.dim;
  p->kv_tokens = k.length;
  p->kv_length = a.max_kv_length > 0 ? std::min(a.max_kv_length, k.length) : k.length;
  p->offset_from_lengths = 1;
  p->cu_seqlens_q.stride[0] = p->cu_seqlens_k.stride[0] = 1;
  set_strides(&p->k, form.strides(k));
  set_strides(&p->v, form.strides(v));
  set_strides(&p->q, form.strides(q));
  describe_rows(a, form, q, p);
  *outputs = {form.shape({1, q.heads, q.length, v.dim}), lse_shape(form, q)};
  return ok();
}

}  // namespace flashonnx

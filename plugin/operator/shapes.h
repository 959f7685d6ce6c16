// What the descriptions of all operators share: checks of shapes, and strides that follow from
// them.
#pragma once

#include <algorithm>
#include <array>

#include "kernels/common/status.h"
#include "operator/geometry.h"

namespace flashonnx {

using Params = flashonnx_attention_params;
using Strides = std::array<int64_t, 4>;  // {batch, head, sequence, 1}

inline long long number(int64_t value) { return static_cast<long long>(value); }

inline flashonnx_status invalid_rank(const char* name, const char* expected, size_t rank) {
  return make_status(FLASHONNX_INVALID_ARGUMENT,
                     "FlashAttention: input '%s' is expected to have %s, got %zu", name, expected,
                     rank);
}

inline flashonnx_status heads_needed(const char* attribute, const char* where) {
  return make_status(FLASHONNX_INVALID_ARGUMENT,
                     "FlashAttention: attribute '%s' is expected with %s, got none", attribute,
                     where);
}

inline flashonnx_status check_dim(const char* name, const char* axis, int64_t expected, int64_t got,
                                  Sizes sizes = Sizes::kExact) {
  if (expected == got || sizes == Sizes::kMaxima) return ok();
  return make_status(FLASHONNX_INVALID_ARGUMENT,
                     "FlashAttention: input '%s' is expected to have %s %lld, got %lld", name, axis,
                     number(expected), number(got));
}

inline flashonnx_status check_heads(const char* attribute, int64_t given, int64_t heads) {
  if (given == 0 || given == heads) return ok();
  return make_status(FLASHONNX_INVALID_ARGUMENT,
                     "FlashAttention: attribute '%s' is expected to be %lld as in the shapes, got "
                     "%lld",
                     attribute, number(heads), number(given));
}

// The last dimension holds `parts` equal parts.
inline flashonnx_status split(const char* name, int64_t dim, int64_t parts, int64_t* size) {
  *size = dim / parts;
  if (dim % parts == 0 && dim > 0) return ok();
  return make_status(FLASHONNX_INVALID_ARGUMENT,
                     "FlashAttention: input '%s' is expected to have a last dimension that is a "
                     "positive multiple of %lld (its heads), got %lld",
                     name, number(parts), number(dim));
}

inline void set_strides(flashonnx_tensor* tensor, const Strides& strides) {
  std::copy(strides.begin(), strides.end(), tensor->stride);
}

inline Strides bhsd(int64_t heads, int64_t length, int64_t dim) {
  return {heads * length * dim, length * dim, dim, 1};
}

inline Strides bshd(int64_t heads, int64_t length, int64_t dim) {
  return {heads * length * dim, dim, heads * dim, 1};
}

// NumPy's broadcasting to (B, Hq, Sq, .); the last dimension is the number of keys that it covers,
// at most `keys`.
inline flashonnx_status describe_mask(const Shape& mask, int64_t keys, Sizes sizes, Params* p) {
  if (mask.rank < 1 || mask.rank > 4) {
    return invalid_rank("attn_mask", "1 to 4 dimensions", mask.rank);
  }
  const int64_t targets[] = {p->batch, p->q_heads, p->q_length};
  const char* const names[] = {"batch size (or 1)", "heads (or 1)", "query length (or 1)"};
  p->mask_keys = mask.dims[mask.rank - 1];
  if (sizes == Sizes::kMaxima) p->mask_keys = std::min(p->mask_keys, keys);
  if (p->mask_keys > keys) {
    return make_status(FLASHONNX_INVALID_ARGUMENT,
                       "FlashAttention: input 'attn_mask' is expected to have a last dimension of "
                       "at most %lld (the keys), got %lld",
                       number(keys), number(p->mask_keys));
  }
  Strides strides = {0, 0, 0, 1};
  int64_t stride = p->mask_keys;
  for (size_t back = 1; back < mask.rank; ++back) {
    const size_t axis = 3 - back;  // in {batch, head, sequence, key}
    const int64_t dim = mask.dims[mask.rank - 1 - back];
    if (dim != 1) {
      FLASHONNX_RETURN_IF_ERROR(check_dim("attn_mask", names[axis], targets[axis], dim, sizes));
      strides[axis] = stride;
    }
    stride *= dim;
  }
  set_strides(&p->mask, strides);
  return ok();
}

inline flashonnx_status check_vector(const char* name, const char* axis, const Shape& shape,
                                     int64_t length, Sizes sizes) {
  if (!shape.present) return ok();
  if (shape.rank != 1) return invalid_rank(name, "1 dimension", shape.rank);
  return check_dim(name, axis, length, shape.dims[0], sizes);
}

}  // namespace flashonnx

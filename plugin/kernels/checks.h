// What the checks of a problem share: limits, and errors that name the field, what was expected and
// what came.
#pragma once

#include "kernels/common/status.h"
#include "kernels/validate.h"

namespace flashonnx {

// Sizes and offsets below this keep every sum of positions far from 64-bit overflow, tensors below
// that every offset in bytes.
constexpr int64_t kMaxSize = int64_t{1} << 40;
constexpr int64_t kMaxElements = int64_t{1} << 56;

constexpr uint32_t bit(int32_t dtype) { return 1u << dtype; }
constexpr uint32_t kFloats =
    bit(FLASHONNX_FLOAT32) | bit(FLASHONNX_FLOAT16) | bit(FLASHONNX_BFLOAT16);
constexpr uint32_t kElements = kFloats | bit(FLASHONNX_FLOAT8_E4M3);

inline flashonnx_status invalid(const char* name, const char* expected, long long got) {
  return make_status(FLASHONNX_INVALID_ARGUMENT,
                     "FlashAttention: '%s' is expected to be %s, got %lld", name, expected, got);
}

inline flashonnx_status check_size(const char* name, int64_t value, int64_t least) {
  if (value >= least && value <= kMaxSize) return ok();
  return invalid(name, least ? "at least 1 and at most 2^40" : "between 0 and 2^40", value);
}

inline flashonnx_status check_elements(const char* name, int64_t batch, int64_t heads,
                                       int64_t length, int64_t dim) {
  int64_t elements = batch;
  bool overflow = __builtin_mul_overflow(elements, heads, &elements);
  overflow |= __builtin_mul_overflow(elements, length, &elements);
  overflow |= __builtin_mul_overflow(elements, dim, &elements);
  if (!overflow && elements <= kMaxElements) return ok();
  return make_status(FLASHONNX_INVALID_ARGUMENT,
                     "FlashAttention: '%s' is expected to have at most 2^56 elements, got %lld x "
                     "%lld x %lld x %lld",
                     name, static_cast<long long>(batch), static_cast<long long>(heads),
                     static_cast<long long>(length), static_cast<long long>(dim));
}

enum class Presence { kRequired, kOptional };

inline bool present(const flashonnx_tensor& tensor) { return tensor.dtype != FLASHONNX_NONE; }

inline flashonnx_status check_reserved(const char* name, int32_t value) {
  if (value == 0) return ok();
  return make_status(FLASHONNX_INVALID_ARGUMENT,
                     "FlashAttention: 'reserved' of '%s' is expected to be 0, got %d", name, value);
}

inline flashonnx_status check_tensor(const char* name, const flashonnx_tensor& tensor,
                                     Presence presence, uint32_t dtypes, const char* expected,
                                     bool dense_rows) {
  FLASHONNX_RETURN_IF_ERROR(check_reserved(name, tensor.reserved));
  if (tensor.dtype == FLASHONNX_NONE) {
    if (presence == Presence::kOptional) return ok();
    return make_status(FLASHONNX_INVALID_ARGUMENT, "FlashAttention: input '%s' is required", name);
  }
  if (tensor.dtype < 0 || tensor.dtype > FLASHONNX_INT64 || !(bit(tensor.dtype) & dtypes)) {
    return make_status(FLASHONNX_INVALID_ARGUMENT,
                       "FlashAttention: '%s' is expected to have dtype %s, got %s", name, expected,
                       dtype_name(tensor.dtype));
  }
  if (dense_rows && tensor.stride[3] != 1) {
    return make_status(FLASHONNX_INVALID_ARGUMENT,
                       "FlashAttention: '%s' is expected to have innermost stride 1, got %lld",
                       name, static_cast<long long>(tensor.stride[3]));
  }
  return ok();
}

// INVALID_ARGUMENT if a tensor of `rows` > 0 rows has no data.
inline flashonnx_status check_data(const char* name, const flashonnx_tensor& tensor, int64_t rows) {
  if (!present(tensor) || rows <= 0 || tensor.data != nullptr) return ok();
  return make_status(FLASHONNX_INVALID_ARGUMENT,
                     "FlashAttention: '%s' is expected to have data, got a null pointer", name);
}

// INVALID_ARGUMENT if one of two tensors is there without the other.
flashonnx_status check_pair(const char* key_name, const flashonnx_tensor& key,
                            const char* value_name, const flashonnx_tensor& value);

// INVALID_ARGUMENT if present_<kind> shares the memory of what it continues, but not its layout.
flashonnx_status check_alias(const char* kind, const char* source_name,
                             const flashonnx_tensor& present, const flashonnx_tensor& source);

// INVALID_ARGUMENT if what is written begins where another tensor does. Views of one buffer, keys
// and values in turn, begin at different places.
flashonnx_status check_apart(const char* name, const flashonnx_tensor& written,
                             const char* other_name, const flashonnx_tensor& other);

// Of validate_cache.cpp: what validate and validate_data say of caches, rotary embeddings and
// ragged batches.
flashonnx_status check_cache(const Params& params);
flashonnx_status check_cache_data(const Params& params);

}  // namespace flashonnx

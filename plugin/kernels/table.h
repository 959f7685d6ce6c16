// Every kernel of the library, one row each: read kernels() to know what is supported. select()
// takes the first row that fits, so faster kernels stand before more general ones.
#pragma once

#include <cstdint>

#include "flashonnx/attention.h"

namespace flashonnx {

using Params = flashonnx_attention_params;

// What a problem may ask for beyond dense softmax(scale Q K^T) V. A kernel's row lists those it
// does.
enum Feature : uint32_t {
  kMask = 1u << 0,
  kKeyLengths = 1u << 1,
  kCausal = 1u << 2,
  kWindow = 1u << 3,
  kSoftcap = 1u << 4,
  kSinks = 1u << 5,
  kLse = 1u << 6,
  kEmptyRowMean = 1u << 7,
  kFixedSplit = 1u << 8,
  kOutputDtype = 1u << 9,  // O of another dtype than Q
  kDescale = 1u << 10,
  kDropout = 1u << 11,
  kRagged = 1u << 12,
  kCache = 1u << 13,
  kPages = 1u << 14,
  kRotary = 1u << 15,
};

struct Kernel {
  const char* name;
  int32_t device;    // FLASHONNX_CPU or FLASHONNX_CUDA
  int32_t min_arch;  // compute capability * 10, inclusive; 0 for the CPU
  int32_t max_arch;
  uint32_t dtypes;       // bits 1 << FLASHONNX_FLOAT32 ...: of Q, K and V
  int64_t max_head_dim;  // of D and Dv
  uint32_t features;
  // Bytes of workspace for this problem, and at most for any of sizes up to these; null: none. As
  // the functions after launch, they are asked with one of what there is none of: attention.cpp.
  int64_t (*workspace)(const Params&);
  int64_t (*workspace_bound)(const Params&);
  // Called with a validated problem without past, present, cache and rotary embedding (resolve.h
  // has seen to them): k and v hold all Sk = kv_length keys, B, Hq and Sq are > 0, scale is set,
  // mask_keys is in [0, Sk], windows are -1 or clamped so that sums with positions cannot overflow.
  // kv_length may be 0.
  //
  // kRagged: Q and O are q_tokens rows, strides {unused, head, token, 1}; of lse {unused, head,
  // token}. Sequence b has rows [cu_seqlens_q[b], cu_seqlens_q[b + 1]), which are in order and
  // range (contiguous int32 in the workspace); q_length bounds the longest, and rows beyond it are
  // not to be written. K and V likewise with cu_seqlens_k, and kv_length bounds the keys of a
  // sequence; without cu_seqlens_k they are (B, Hkv, kv_length) with key_lengths, or pages. Query i
  // of its sequence stands at causal_offset + i, plus (its keys - its queries) if
  // offset_from_lengths is set.
  // kPages: k and v are pages, strides {page, head, slot, 1}; key j of batch entry b is slot j %
  // page_size of page block_table[b][j / page_size], and masked if that is not in [0, num_pages).
  // kv_length = page_size * the table's width; key_lengths (int32) say how many keys there are.
  flashonnx_status (*launch)(const Params&, void* workspace, void* stream);
  // Why a problem within the limits above is left to a later row, or null; the function may be
  // null.
  const char* (*refusal)(const Params&) = nullptr;
  // Whether it sees to q_bias, k_bias and v_bias of data that may be null (then: wherever it lies);
  // they have been added before where it does not, or where the function is null.
  bool (*adds_biases)(const Params&) = nullptr;
};

// The table, null-terminated by a row without a name.
const Kernel* kernels();

// Whether FLASHONNX_LOG is set, to something else than 0.
bool log_enabled();

namespace cpu {
flashonnx_status launch(const Params& params, void* workspace, void* stream);
int64_t workspace(const Params& params);
}  // namespace cpu

namespace decode {
flashonnx_status launch(const Params& params, void* workspace, void* stream);
int64_t workspace(const Params& params);
int64_t workspace_bound(const Params& maxima);
const char* refusal(const Params& params);
}  // namespace decode

namespace sm80 {
flashonnx_status launch(const Params& params, void* workspace, void* stream);
const char* refusal(const Params& params);
}  // namespace sm80

namespace sm90 {
flashonnx_status launch(const Params& params, void* workspace, void* stream);
int64_t workspace(const Params& params);
int64_t workspace_bound(const Params& maxima);
const char* refusal(const Params& params);
bool adds_biases(const Params& params);
}  // namespace sm90

namespace tf32 {
flashonnx_status launch(const Params& params, void* workspace, void* stream);
const char* refusal(const Params& params);
}  // namespace tf32

namespace simt {
flashonnx_status launch(const Params& params, void* workspace, void* stream);
int64_t workspace(const Params& params);
const char* refusal(const Params& params);
}  // namespace simt

}  // namespace flashonnx

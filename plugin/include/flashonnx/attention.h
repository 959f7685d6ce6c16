// The seam of flashonnx: one plain struct describes an attention problem, four functions answer for
// it.
//
//   Y = softmax(softcap(scale * Q K^T) + mask, structural masks) V        per batch and query head
//
// ONNX Runtime's and TensorRT's adapters, PyTorch and plain C callers all come through here, and
// every function asks the same selector, so what is supported, how much workspace it needs and what
// is launched cannot disagree. The library never throws, exits, prints (unless FLASHONNX_LOG is
// set), synchronises or allocates device memory.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "flashonnx/status.h"

#if defined(__GNUC__)
#define FLASHONNX_API __attribute__((visibility("default")))
#else
#define FLASHONNX_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum {                 // flashonnx_tensor.dtype
  FLASHONNX_NONE = 0,  // the tensor is absent
  FLASHONNX_FLOAT32 = 1,
  FLASHONNX_FLOAT16 = 2,
  FLASHONNX_BFLOAT16 = 3,
  FLASHONNX_FLOAT8_E4M3 = 4,
  FLASHONNX_BOOL = 5,
  FLASHONNX_INT8 = 6,
  FLASHONNX_INT32 = 7,
  FLASHONNX_INT64 = 8,
};

enum { FLASHONNX_CPU = 0, FLASHONNX_CUDA = 1 };  // flashonnx_device.kind

enum {  // empty_row: the output of a query that may see no key
  FLASHONNX_EMPTY_ROW_ZERO = 0,
  FLASHONNX_EMPTY_ROW_MEAN =
      1,  // the mean of V over all keys below the batch's key length (0 if there are none)
};

// Where a problem will run. Fill it with flashonnx_device_query, or by hand for a target that is
// not at hand.
typedef struct flashonnx_device {
  int32_t kind;           // FLASHONNX_CPU or FLASHONNX_CUDA
  int32_t ordinal;        // CUDA device number; 0 for the CPU
  int32_t arch;           // 10 * compute capability, e.g. 90 for Hopper; 0 for the CPU
  int32_t sm_count;       // multiprocessors, or CPU threads worth using (0: unknown)
  int64_t shared_memory;  // bytes of shared memory a block may opt in to; 0 for the CPU
} flashonnx_device;

// A strided view. The innermost dimension of Q, K, V, the caches and O is contiguous (stride[3] ==
// 1); a mask broadcasts by zero strides in any dimension. Absent if and only if dtype is
// FLASHONNX_NONE; `data` is looked at by `run` alone.
typedef struct flashonnx_tensor {
  void* data;
  int64_t stride[4];  // in elements; their meaning stands beside each tensor below
  int32_t dtype;
  int32_t reserved;  // 0
} flashonnx_tensor;

// CPU only: calls body(data, i) for every i in [0, count), from any threads, and returns when all
// are done.
typedef void (*flashonnx_parallel_for)(void* context, int64_t count,
                                       void (*body)(void* data, int64_t index), void* data);

// Zero-initialise, set struct_size and the defaults with flashonnx_attention_init, then fill in
// what the problem has.
typedef struct flashonnx_attention_params {
  int64_t struct_size;  // sizeof(flashonnx_attention_params): later versions append fields
  flashonnx_device device;

  // -- sizes
  int64_t batch;        // B; for ragged batches the number of sequences
  int64_t q_heads;      // Hq
  int64_t kv_heads;     // Hkv, divides Hq: query head h reads key head h / (Hq / Hkv)
  int64_t q_length;     // Sq; ragged: the longest
  int64_t kv_length;    // keys in k and v, without the past; ragged: the longest
  int64_t past_length;  // keys in past_k and past_v; Sk = past_length + kv_length
  int64_t head_dim;     // D of Q and K
  int64_t value_dim;    // Dv of V and O

  // -- tensors: strides are {batch, head, sequence, 1}
  flashonnx_tensor q;    // (B, Hq, Sq, D)
  flashonnx_tensor k;    // (B, Hkv, kv_length, D)
  flashonnx_tensor v;    // (B, Hkv, kv_length, Dv)
  flashonnx_tensor o;    // (B, Hq, Sq, Dv), always written in full; its dtype may differ from Q's
                         // where a kernel says so
  flashonnx_tensor lse;  // optional float32 (B, Hq, Sq): natural log of the sum of exp(scores),
                         // without the sink; -inf: empty row
  flashonnx_tensor past_k;     // optional (B, Hkv, past_length, D): keys before k
  flashonnx_tensor past_v;     // optional (B, Hkv, past_length, Dv)
  flashonnx_tensor present_k;  // optional output (B, Hkv, Sk, D): past then new; may be past_k's
                               // own memory (nothing is copied then)
  flashonnx_tensor present_v;  // optional output (B, Hkv, Sk, Dv)

  // -- masks; a masked score is -inf whatever stands in that slot of Q, K or V
  flashonnx_tensor mask;  // optional, broadcast to (B, Hq, Sq, mask_keys): bool/int8/int32
                          // (non-zero: attend) or additive float
  int64_t mask_keys;      // length of the mask's last dimension, <= Sk; keys beyond it are masked
  flashonnx_tensor key_lengths;  // optional int32 or int64 (B), stride[0]: keys at or past it are
                                 // masked; clamped to [0, Sk]
  int32_t is_causal;             // query i sees key j only if j <= i + offset
  int32_t
      offset_from_lengths;  // offset(b) = causal_offset, plus key_lengths[b] - Sq if this is set
  int64_t causal_offset;    // 0: aligned top left; past_length with a past
  int64_t window_left;   // query i sees key j only if j >= i + offset - window_left; -1: no bound
  int64_t window_right;  // query i sees key j only if j <= i + offset + window_right; -1: no bound

  // -- arithmetic
  float scale;        // multiplies Q K^T, positive; flashonnx_attention_init leaves 0: 1 / sqrt(D)
  float softcap;      // > 0: scores become softcap * tanh(scores / softcap) before the mask
  int32_t empty_row;  // FLASHONNX_EMPTY_ROW_*
  int32_t fixed_split;         // != 0: results of a batch entry do not depend on its batch mates
  flashonnx_tensor sinks;      // optional float32 (Hq), stride[0]: exp(sink) joins the denominator
  flashonnx_tensor q_descale;  // optional float32 {batch, head}: true value = stored value *
                               // descale (float8 inputs)
  flashonnx_tensor k_descale;
  flashonnx_tensor v_descale;
  float dropout;     // probability; seed and offset are read on the device
  int32_t reserved;  // 0
  const uint64_t* dropout_seed;
  const uint64_t* dropout_offset;

  // -- ragged batches: Q, K, V and O are packed tokens (T, H, D): the batch strides are unused, and
  // those of lse are {unused, head, token}. Sequence b holds tokens [cu_seqlens_q[b],
  // cu_seqlens_q[b + 1]), numbers that are brought into order and range on the device; a row of O
  // in no sequence, or q_length or more behind the start of its own, is 0 (lse -inf). Sq and Sk
  // above mean the sequence's own. No mask.
  flashonnx_tensor cu_seqlens_q;  // optional int32 (B + 1)
  flashonnx_tensor cu_seqlens_k;  // optional int32 (B + 1), together with cu_seqlens_q: of K and V;
                                  // not with a cache, whose new keys have cu_seqlens_q

  // -- key/value cache in place of past and key_lengths: the q_length keys of k and v (the
  // sequence's own if ragged; none if they are absent) are appended at cache_lengths[b], then all
  // are attended. Keys that find no slot, or no page, are dropped. Query i stands at key
  // (keys after this call) - Sq + i; causal_offset has to be 0, offset_from_lengths is implied.
  // present_k and present_v may name another memory of the cache's shape, to which it is copied
  // first; absent, or the cache's own memory: the cache is changed in place and nothing is copied.
  flashonnx_tensor cache_k;  // contiguous (B, Hkv, capacity, D), or pages: {page, head, slot, 1}
  flashonnx_tensor cache_v;
  int64_t cache_capacity;          // slots per sequence; with pages: page_size * those of its table
  flashonnx_tensor cache_lengths;  // int32 or int64 (B), stride[0]: keys in the cache before this
                                   // call; clamped to [0, capacity]
  flashonnx_tensor block_table;    // optional int32 (B, pages): stride {batch, page}; slot s of a
                                   // sequence is slot s % page_size of page block_table[b][s /
                                   // page_size]; keys of a page outside [0, num_pages) are masked
  int64_t page_size;               // slots per page; 0: contiguous
  flashonnx_tensor rotary_cos;     // optional (positions, rotary_dim / 2), float32 or of Q's type:
                                   // stride {position, 1}
  flashonnx_tensor rotary_sin;
  flashonnx_tensor rotary_positions;  // optional int64 (B, Sq): stride {batch, token}, ragged:
                                      // {unused, token}; absent: where the query stands (above),
                                      // before the cache's end cuts it. Clamped to the table.
  int64_t rotary_dim;                 // leading features of Q and of new keys that are rotated; 0:
                                      // none
  int32_t rotary_interleaved;         // pairs (0,1)(2,3).. instead of halves
  int32_t reserved_cache;             // 0
  int64_t num_pages;                  // pages that cache_k and cache_v hold
  int64_t rotary_length;              // positions that rotary_cos and rotary_sin hold
  int64_t q_tokens;                   // ragged: rows of Q and O, and of a cache's new keys
  int64_t kv_tokens;                  // with cu_seqlens_k: rows of K and V

  // -- CPU only; absent: the library's own threads
  flashonnx_parallel_for parallel_for;
  void* parallel_context;

  // -- biases of the projections that made Q, K and V, of Q's type: added to every row of q, k and
  // v (not of the past) before anything else, rounded to the type where a kernel adds them to rows.
  // No cache, no ragged batch.
  flashonnx_tensor q_bias;  // optional (Hq, D): stride {unused, head, unused, 1}
  flashonnx_tensor k_bias;  // optional (Hkv, D)
  flashonnx_tensor v_bias;  // optional (Hkv, Dv)
} flashonnx_attention_params;

FLASHONNX_API const char* flashonnx_version(void);

// Fills `device` from CUDA device `ordinal` (-1: the calling thread's current one).
FLASHONNX_API flashonnx_status flashonnx_device_query(int32_t kind, int32_t ordinal,
                                                      flashonnx_device* device);

// An empty problem with every default: no mask, no windows (-1), scale 1/sqrt(D), mask_keys -1 (the
// mask covers all keys).
FLASHONNX_API void flashonnx_attention_init(flashonnx_attention_params* params);

// OK and the kernel's name, or why not. Looks at sizes, strides, dtypes and the device, never at
// data pointers.
FLASHONNX_API flashonnx_status
flashonnx_attention_supported(const flashonnx_attention_params* params);

// Bytes of workspace (256-byte aligned device memory; host memory for the CPU) that `run` needs for
// exactly this problem: with its data where the pointers say or, if they are null, anywhere.
FLASHONNX_API flashonnx_status
flashonnx_attention_workspace(const flashonnx_attention_params* params, int64_t* bytes);

// An upper bound of the above over all problems whose sizes are at most these: for engines planned
// from maximal shapes.
FLASHONNX_API flashonnx_status
flashonnx_attention_workspace_bound(const flashonnx_attention_params* maxima, int64_t* bytes);

// Enqueues the work on `stream` (a cudaStream_t; ignored on the CPU, where it returns when the work
// is done). Thread-safe, capturable in a CUDA graph. `stream` must belong to
// params->device.ordinal.
FLASHONNX_API flashonnx_status flashonnx_attention_run(const flashonnx_attention_params* params,
                                                       void* workspace, void* stream);

#ifdef __cplusplus
}
#endif

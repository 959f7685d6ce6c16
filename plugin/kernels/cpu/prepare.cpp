#include "kernels/cache/prepare.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "kernels/common/status.h"
#include "kernels/cpu/task.h"

namespace flashonnx::cpu {
namespace {

constexpr int64_t kTokens = 8;  // of a task

bool present(const flashonnx_tensor& tensor) { return tensor.dtype != FLASHONNX_NONE; }

int64_t bytes_of(int32_t dtype) { return dtype == FLASHONNX_FLOAT32 ? 4 : 2; }

char* at(const flashonnx_tensor& tensor, int64_t element) {
  return static_cast<char*>(tensor.data) + element * bytes_of(tensor.dtype);
}

struct Job {
  const Params& params;
  const Params& problem;
  Rotate rotate;
  int64_t tokens;
};

// Of a ragged batch, or of a regular one whose tokens are counted through: element offsets of a
// token's row of head h follow from `row` and the strides.
struct Token {
  int64_t b, i, tokens;  // of batch entry b, which has so many
  int64_t row;           // among all

  int64_t offset(const flashonnx_tensor& tensor, int64_t h, bool ragged) const {
    return (ragged ? row : i) * tensor.stride[2] + h * tensor.stride[1] +
           (ragged ? 0 : b * tensor.stride[0]);
  }
};

void rotate_row(const Job& job, int64_t position, const char* source, char* target) {
  const Params& p = job.params;
  job.rotate({source, target, at(p.rotary_cos, position * p.rotary_cos.stride[0]),
              at(p.rotary_sin, position * p.rotary_sin.stride[0]), p.q.dtype, p.rotary_cos.dtype,
              p.rotary_interleaved != 0, p.head_dim, p.rotary_dim});
}

void append_token(const Job& job, const Token& token, bool ragged) {
  const Params& p = job.params;
  const bool rotary = p.rotary_dim > 0;
  const int64_t position =
      rotary ? rotary_position(p, token.b, token.i, token.tokens, token.row) : 0;
  for (int64_t h = 0; rotary && h < p.q_heads; ++h) {
    rotate_row(job, position, at(p.q, token.offset(p.q, h, ragged)),
               at(job.problem.q, token.offset(job.problem.q, h, ragged)));
  }
  if (!present(p.k)) return;
  const int64_t slot = cached_keys(p, token.b) + token.i, size = bytes_of(p.q.dtype);
  for (int64_t h = 0; h < p.kv_heads; ++h) {
    const int64_t key = place_of_key(p, job.problem.k, token.b, h, slot);
    const int64_t value = place_of_key(p, job.problem.v, token.b, h, slot);
    if (key < 0) {
      if (log_enabled() && slot < p.cache_capacity) {
        std::fprintf(stderr,
                     "flashonnx: sequence %lld: slot %lld has no page: its key is dropped\n",
                     static_cast<long long>(token.b), static_cast<long long>(slot));
      }
      return;
    }
    const char* source = at(p.k, token.offset(p.k, h, ragged));
    if (rotary) {
      rotate_row(job, position, source, at(job.problem.k, key));
    } else {
      std::memcpy(at(job.problem.k, key), source, p.head_dim * size);
    }
    std::memcpy(at(job.problem.v, value), at(p.v, token.offset(p.v, h, ragged)),
                p.value_dim * size);
  }
}

void clear_row(const Params& p, int64_t row) {
  for (int64_t h = 0; h < p.q_heads; ++h) {
    std::memset(at(p.o, h * p.o.stride[1] + row * p.o.stride[2]), 0,
                p.value_dim * bytes_of(p.o.dtype));
    if (present(p.lse)) {
      static_cast<float*>(p.lse.data)[h * p.lse.stride[1] + row * p.lse.stride[2]] = -INFINITY;
    }
  }
}

void process_tokens(void* data, int64_t task) {
  const Job& job = *static_cast<const Job*>(data);
  const Params& p = job.params;
  const int64_t first = task * kTokens, end = std::min(first + kTokens, job.tokens);
  if (!present(p.cu_seqlens_q)) {
    for (int64_t row = first; row < end; ++row)
      append_token(job, {row / p.q_length, row % p.q_length, p.q_length, row}, false);
    return;
  }
  const int32_t* begin = static_cast<const int32_t*>(job.problem.cu_seqlens_q.data);
  for (int64_t row = first; row < end; ++row) {
    // The sequence before the first that begins later.
    const int64_t b = std::upper_bound(begin, begin + p.batch + 1, row) - begin - 1;
    const bool inside = b >= 0 && b < p.batch;
    if (!inside || row - begin[b] >= p.q_length) clear_row(p, row);
    if (inside && present(p.cache_k))
      append_token(job, {b, row - begin[b], begin[b + 1] - begin[b], row}, true);
  }
}

void order_sequences(const Params& p, const flashonnx_tensor& given, int64_t tokens,
                     const flashonnx_tensor& target, const char* name) {
  int64_t last = 0;
  bool changed = false;
  for (int64_t b = 0; b <= p.batch; ++b) {
    const int64_t value = integer_at(given, b * given.stride[0]);
    last = std::max(last, std::min(value, tokens));
    changed |= last != value;
    static_cast<int32_t*>(target.data)[b] = static_cast<int32_t>(last);
  }
  if (changed && log_enabled()) {
    std::fprintf(stderr, "flashonnx: %s is out of order, or of [0, %lld]: brought into them\n",
                 name, static_cast<long long>(tokens));
  }
}

void count_keys(const Params& p, const Params& problem) {
  const int32_t* sequences = static_cast<const int32_t*>(problem.cu_seqlens_q.data);
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t given = integer_at(p.cache_lengths, b * p.cache_lengths.stride[0]);
    const int64_t tokens = sequences ? sequences[b + 1] - sequences[b] : p.q_length;
    const int64_t wanted = cached_keys(p, b) + (present(p.k) ? tokens : 0);
    static_cast<int32_t*>(problem.key_lengths.data)[b] =
        static_cast<int32_t>(std::min(wanted, p.cache_capacity));
    if ((given != cached_keys(p, b) || wanted > p.cache_capacity) && log_enabled()) {
      std::fprintf(stderr,
                   "flashonnx: sequence %lld: cache_lengths %lld and %lld new keys do not fit into "
                   "%lld slots: what is outside is dropped\n",
                   static_cast<long long>(b), static_cast<long long>(given),
                   static_cast<long long>(present(p.k) ? tokens : 0),
                   static_cast<long long>(p.cache_capacity));
    }
  }
}

}  // namespace

flashonnx_status prepare(const Params& params, const Params& problem) {
  const bool ragged = present(params.cu_seqlens_q), cache = present(params.cache_k);
  if (ragged) {
    order_sequences(params, params.cu_seqlens_q, params.q_tokens, problem.cu_seqlens_q,
                    "cu_seqlens_q");
  }
  if (present(params.cu_seqlens_k)) {
    order_sequences(params, params.cu_seqlens_k, params.kv_tokens, problem.cu_seqlens_k,
                    "cu_seqlens_k");
  }
  if (cache) count_keys(params, problem);
  if (!ragged && !present(params.k) && params.rotary_dim == 0) return ok();
  Job job{params, problem, best_rotate(),
          ragged ? params.q_tokens : params.batch * params.q_length};
  const int64_t tasks = (job.tokens + kTokens - 1) / kTokens;
  if (params.parallel_for != nullptr && tasks > 1) {
    params.parallel_for(params.parallel_context, tasks, process_tokens, &job);
  } else {
    for (int64_t task = 0; task < tasks; ++task) process_tokens(&job, task);
  }
  return ok();
}

}  // namespace flashonnx::cpu

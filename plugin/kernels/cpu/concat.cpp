#include "kernels/cpu/concat.h"

#include <cstring>

namespace flashonnx::cpu {
namespace {

struct Job {
  const Params& params;
  const flashonnx_tensor& present;
  const flashonnx_tensor& past;
  const flashonnx_tensor& rows;
  int64_t dim;
  int64_t element_size;
  bool copy_past;
};

// Rows that follow each other without gaps on both sides are moved at once.
void copy_rows(const Job& job, const flashonnx_tensor& from, int64_t batch, int64_t head,
               int64_t first, int64_t count) {
  if (count == 0) return;
  const auto at = [&](const flashonnx_tensor& tensor, int64_t row) {
    return static_cast<char*>(tensor.data) +
           (batch * tensor.stride[0] + head * tensor.stride[1] + row * tensor.stride[2]) *
               job.element_size;
  };
  if (from.stride[2] == job.dim && job.present.stride[2] == job.dim) {
    std::memcpy(at(job.present, first), at(from, 0), count * job.dim * job.element_size);
    return;
  }
  for (int64_t row = 0; row < count; ++row) {
    std::memcpy(at(job.present, first + row), at(from, row), job.dim * job.element_size);
  }
}

void copy_head(void* data, int64_t index) {
  const Job& job = *static_cast<const Job*>(data);
  const int64_t batch = index / job.params.kv_heads;
  const int64_t head = index % job.params.kv_heads;
  if (job.copy_past) copy_rows(job, job.past, batch, head, 0, job.params.past_length);
  copy_rows(job, job.rows, batch, head, job.params.past_length, job.params.kv_length);
}

}  // namespace

void concat(const Params& params, const flashonnx_tensor& present, const flashonnx_tensor& past,
            const flashonnx_tensor& rows, int64_t dim, int64_t element_size, bool copy_past) {
  Job job{params, present, past, rows, dim, element_size, copy_past};
  const int64_t count = params.batch * params.kv_heads;
  if (params.parallel_for != nullptr) {
    params.parallel_for(params.parallel_context, count, copy_head, &job);
    return;
  }
  for (int64_t index = 0; index < count; ++index) copy_head(&job, index);
}

}  // namespace flashonnx::cpu

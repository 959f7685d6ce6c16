#include <algorithm>

#include "kernels/cpu/task.h"
#include "kernels/projection.h"

namespace flashonnx::cpu {
namespace {

constexpr int64_t kRows = 8;  // of a task

struct Job {
  const BiasedProjection& projection;
  AddRow add_row;
};

// Rows [kRows * task, ...) of all batch entries, each with its heads.
void add_to_rows(void* data, int64_t task) {
  const auto& [projection, add_row] = *static_cast<const Job*>(data);
  const auto& [from, bias, to, batch, heads, rows, dim] = projection;
  const int64_t size = from.dtype == FLASHONNX_FLOAT32 ? 4 : 2;
  const auto at = [size](const flashonnx_tensor& tensor, int64_t b, int64_t h, int64_t row) {
    return static_cast<char*>(tensor.data) +
           (b * tensor.stride[0] + h * tensor.stride[1] + row * tensor.stride[2]) * size;
  };
  const int64_t end = std::min(kRows * (task + 1), batch * rows);
  for (int64_t i = kRows * task; i < end; ++i) {
    const int64_t b = i / rows, row = i % rows;
    for (int64_t h = 0; h < heads; ++h)
      add_row(from.dtype, at(from, b, h, row), at(bias, 0, h, 0), dim, at(to, b, h, row));
  }
}

}  // namespace

void add_bias(const Params& params, const BiasedProjection& projection) {
  Job job{projection, best_add_row()};
  const int64_t tasks = (projection.batch * projection.rows + kRows - 1) / kRows;
  if (params.parallel_for != nullptr) {
    params.parallel_for(params.parallel_context, tasks, add_to_rows, &job);
  } else {
    for (int64_t task = 0; task < tasks; ++task) add_to_rows(&job, task);
  }
}

}  // namespace flashonnx::cpu

// Chooses the instruction set, cuts the problem into tasks and hands them to the caller's threads
// or to our own.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

#include "../common/status.h"
#include "../table.h"
#include "task.h"

namespace flashonnx::cpu {
namespace {

using RunTask = void (*)(const Params&, const Plan&, int64_t, float*);

struct Functions {
  RunTask run_task;
  Rotate rotate;
  AddRow add_row;
};

Functions best_functions() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return {avx512::run_task, avx512::rotate, avx512::add_row};
  }
  // F16C, which Clang cannot ask for, came before AVX2.
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return {avx2::run_task, avx2::rotate, avx2::add_row};
  }
#endif
  return {generic::run_task, generic::rotate, generic::add_row};
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t pad(int64_t n) { return ceil_div(n, kPad) * kPad; }

int64_t threads(const Params& params) {
  if (params.device.sm_count > 0) return params.device.sm_count;
  static const int64_t hardware = std::max(1u, std::thread::hardware_concurrency());
  return hardware;
}

Plan make_plan(const Params& params) {
  Plan plan{};
  plan.group = params.q_heads / params.kv_heads;
  plan.total_rows = plan.group * params.q_length;
  plan.padded_head_dim = pad(params.head_dim);
  plan.padded_value_dim = pad(params.value_dim);

  // Q and O of a task stay in the L2 cache; below that, enough tasks for the threads to even out.
  constexpr int64_t kRowFloats = 48 * 1024;
  const int64_t dims = plan.padded_head_dim + plan.padded_value_dim;
  const int64_t cap =
      std::clamp<int64_t>(kRowFloats / dims / kBlockRows * kBlockRows, kMinRows, kMaxRows);
  const int64_t heads = params.batch * params.kv_heads;
  const int64_t tiles =
      std::max(ceil_div(plan.total_rows, cap), ceil_div(4 * threads(params), heads));
  plan.rows = std::clamp<int64_t>(
      ceil_div(ceil_div(plan.total_rows, tiles), kBlockRows) * kBlockRows, kBlockRows, cap);
  plan.row_tiles = ceil_div(plan.total_rows, plan.rows);
  plan.tasks = heads * plan.row_tiles;

  // The parts are laid out so that the whole depends on the head dimensions alone and grows with
  // them: a bound over many problems is then the size of the largest.
  plan.q = 0;
  plan.o = plan.rows * plan.padded_head_dim;
  plan.k = std::max(std::min(kRowFloats, kMaxRows * dims), kMinRows * dims);
  plan.v = plan.k + kKeyTile * plan.padded_head_dim;
  plan.scores = plan.v + kKeyTile * plan.padded_value_dim;
  plan.biases = plan.scores + kBlockRows * kKeyTile;
  plan.gathered = plan.biases + kKeyTile;
  const bool paged = params.block_table.dtype != FLASHONNX_NONE;
  plan.scratch = plan.gathered + (paged ? kKeyTile * dims : 0);
  return plan;
}

// Workers that take tasks until none is left: a worker needs its own scratch, a task does not, and
// threads that come late do less.
int64_t worker_count(const Params& params) {
  return std::min(threads(params), params.batch * params.q_heads * params.q_length);
}

struct Job {
  const Params& params;
  const Plan& plan;
  RunTask run_task;
  float* workspace;
  std::atomic<int64_t> next{0};
};

void work(void* data, int64_t worker) {
  Job& job = *static_cast<Job*>(data);
  for (int64_t task; (task = job.next.fetch_add(1, std::memory_order_relaxed)) < job.plan.tasks;) {
    job.run_task(job.params, job.plan, task, job.workspace + worker * job.plan.scratch);
  }
}

// Own threads, for the length of the call; this one works too. Where none can be had, it does all.
void work_on_threads(Job& job, int64_t workers) {
  std::vector<std::thread> helpers;
  try {
    helpers.reserve(workers - 1);
    for (int64_t i = 1; i < workers; ++i) helpers.emplace_back(work, &job, i);
  } catch (const std::exception&) {
  }
  work(&job, 0);
  for (std::thread& helper : helpers) helper.join();
}

// The problem with bounds that are as tight as the lengths allow, which the CPU may look at.
Params tighten(const Params& given) {
  Params params = given;
  if (given.cu_seqlens_q.dtype != FLASHONNX_NONE) {
    const int32_t* begin = static_cast<const int32_t*>(given.cu_seqlens_q.data);
    params.q_length = 0;
    for (int64_t b = 0; b < given.batch; ++b)
      params.q_length = std::max<int64_t>(params.q_length, begin[b + 1] - begin[b]);
    params.q_length = std::min(params.q_length, given.q_length);
  }
  return params;
}

// Starting a thread costs about as much as this many multiplications.
constexpr double kProductsPerThread = 1e6;

}  // namespace

Rotate best_rotate() { return best_functions().rotate; }
AddRow best_add_row() { return best_functions().add_row; }

int64_t workspace(const Params& params) {
  return worker_count(params) * make_plan(params).scratch * static_cast<int64_t>(sizeof(float));
}

flashonnx_status launch(const Params& given, void* workspace, void*) {
  if (workspace == nullptr) {
    return make_status(FLASHONNX_INVALID_ARGUMENT,
                       "the CPU kernel is expected to be given a workspace, got null");
  }
  const Params params = tighten(given);
  const Plan plan = make_plan(params);
  Job job{params, plan, best_functions().run_task, static_cast<float*>(workspace)};
  int64_t workers = std::min(worker_count(params), plan.tasks);
  if (params.parallel_for != nullptr) {
    params.parallel_for(params.parallel_context, workers, work, &job);
    return ok();
  }
  const double products = static_cast<double>(plan.tasks) * plan.rows * params.kv_length *
                          (params.head_dim + params.value_dim);
  workers = std::min(workers, 1 + static_cast<int64_t>(products / kProductsPerThread));
  work_on_threads(job, workers);
  return ok();
}

}  // namespace flashonnx::cpu

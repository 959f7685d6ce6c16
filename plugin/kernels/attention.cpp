// The seam's functions: validate the problem, plan it, select a kernel from the table, run.
#include "flashonnx/attention.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "kernels/checks.h"
#include "kernels/projection.h"
#include "kernels/resolve.h"
#include "kernels/table.h"
#ifdef FLASHONNX_WITH_CUDA
#include "kernels/common/cuda.h"
#include "kernels/decode/after_append.h"
#endif

namespace flashonnx {
namespace {

constexpr uint32_t kAllFloats =
    1u << FLASHONNX_FLOAT32 | 1u << FLASHONNX_FLOAT16 | 1u << FLASHONNX_BFLOAT16;
constexpr uint32_t kFloat32 = 1u << FLASHONNX_FLOAT32;
constexpr uint32_t kHalves = 1u << FLASHONNX_FLOAT16 | 1u << FLASHONNX_BFLOAT16;
constexpr uint32_t kOperator = kMask | kKeyLengths | kCausal | kWindow | kSoftcap | kSinks | kLse |
                               kEmptyRowMean | kFixedSplit | kOutputDtype;
constexpr int32_t kAnyArch = 1 << 30;

constexpr Kernel kTable[] = {
#ifdef FLASHONNX_WITH_CUDA
    {"decode", FLASHONNX_CUDA, 80, kAnyArch, kHalves, 256,
     (kOperator & ~kEmptyRowMean) | kRagged | kPages, decode::workspace, decode::workspace_bound,
     decode::launch, decode::refusal},
#endif
#ifdef FLASHONNX_WITH_SM90
    {"sm90", FLASHONNX_CUDA, 90, 90, kHalves, 256, kOperator | kRagged | kPages, sm90::workspace,
     sm90::workspace_bound, sm90::launch, sm90::refusal, sm90::adds_biases},
#endif
#ifdef FLASHONNX_WITH_CUDA
    {"sm80", FLASHONNX_CUDA, 80, kAnyArch, kHalves, 256, kOperator | kRagged | kPages, nullptr,
     nullptr, sm80::launch, sm80::refusal},
    {"tf32", FLASHONNX_CUDA, 80, kAnyArch, kFloat32, 128, kOperator, nullptr, nullptr, tf32::launch,
     tf32::refusal},
    {"simt", FLASHONNX_CUDA, 80, kAnyArch, kAllFloats, 512, kOperator | kRagged | kPages,
     simt::workspace, simt::workspace, simt::launch, simt::refusal},
#endif
    {"cpu", FLASHONNX_CPU, 0, 0, kAllFloats, 512, kOperator | kRagged | kPages, cpu::workspace,
     cpu::workspace, cpu::launch},
    {},
};

constexpr const char* kFeatureNames[] = {
    "attn_mask",  "nonpad_kv_seqlen",  "is_causal",     "windows",      "softcap", "sinks",
    "lse",        "empty_row mean",    "fixed_split",   "output dtype", "descale", "dropout",
    "cu_seqlens", "a key/value cache", "a block table", "rotary"};

uint32_t required_features(const Params& p) {
  uint32_t features = 0;
  const auto need = [&](bool condition, Feature feature) {
    features |= condition ? uint32_t{feature} : 0;
  };
  need(present(p.mask), kMask);
  need(present(p.key_lengths), kKeyLengths);
  need(p.is_causal != 0, kCausal);
  need(p.window_left >= 0 || p.window_right >= 0, kWindow);
  need(p.softcap > 0, kSoftcap);
  need(present(p.sinks), kSinks);
  need(present(p.lse), kLse);
  need(p.empty_row == FLASHONNX_EMPTY_ROW_MEAN, kEmptyRowMean);
  need(p.fixed_split != 0, kFixedSplit);
  need(p.o.dtype != p.q.dtype, kOutputDtype);
  need(present(p.q_descale) || present(p.k_descale) || present(p.v_descale), kDescale);
  need(p.dropout > 0, kDropout);
  need(present(p.cu_seqlens_q) || present(p.cu_seqlens_k), kRagged);
  need(present(p.cache_k), kCache);
  need(present(p.block_table), kPages);
  need(p.rotary_dim != 0, kRotary);
  return features;
}

// True if the kernel fits, else its reason is appended. The device's kind has been compared
// already.
bool fits(const Kernel& kernel, const Params& p, char* reasons, size_t capacity) {
  const size_t used = std::strlen(reasons);
  const auto refuse = [&](const char* format, auto... arguments) {
    const int more = std::snprintf(reasons + used, capacity - used, "%skernel %s ",
                                   used ? "; " : "", kernel.name);
    const size_t begin = std::min(used + more, capacity - 1);
    std::snprintf(reasons + begin, capacity - begin, format, arguments...);
    return false;
  };
  if (p.device.arch < kernel.min_arch || p.device.arch > kernel.max_arch) {
    return refuse("is for compute capability %d.%d and later, the device has %d.%d",
                  kernel.min_arch / 10, kernel.min_arch % 10, p.device.arch / 10,
                  p.device.arch % 10);
  }
  if (!(kernel.dtypes & 1u << p.q.dtype))
    return refuse("has no code for dtype %s", dtype_name(p.q.dtype));
  const int64_t dim = std::max(p.head_dim, p.value_dim);
  if (dim > kernel.max_head_dim) {
    return refuse("does head dimensions up to %lld, got %lld",
                  static_cast<long long>(kernel.max_head_dim), static_cast<long long>(dim));
  }
  const uint32_t missing = required_features(p) & ~kernel.features;
  if (missing != 0) return refuse("does not support %s", kFeatureNames[std::countr_zero(missing)]);
  if (kernel.refusal == nullptr) return true;
  const char* reason = kernel.refusal(p);
  return reason == nullptr || refuse("%s", reason);
}

flashonnx_status select(const Params& p, const Kernel** chosen) {
  char reasons[448] = "";
  for (const Kernel* kernel = kernels(); kernel->name != nullptr; ++kernel) {
    if (kernel->device != p.device.kind) continue;
    if (fits(*kernel, p, reasons, sizeof reasons)) {
      *chosen = kernel;
      return ok();
    }
  }
  return make_status(
      FLASHONNX_NOT_IMPLEMENTED, "FlashAttention: %s",
      reasons[0] ? reasons : "this build of the library has no kernels for the device");
}

struct Plan {
  Params given;  // with sums in place of projections whose biases no kernel adds
  Sums sums;
  Resolved resolved;
  Params asked;  // what kernels are chosen by
  const Kernel* kernel = nullptr;
};

// The problem with one of everything that it has none of: kernels are not asked about empty ones,
// so that none divides by nothing. Its workspace is enough for the problem itself.
Params at_least_one(Params p) {
  const auto fill = [](int64_t& size) { size = std::max<int64_t>(size, 1); };
  fill(p.batch), fill(p.q_length), fill(p.kv_length);
  if (present(p.cu_seqlens_q)) fill(p.q_tokens);
  if (present(p.cu_seqlens_k)) fill(p.kv_tokens);
  if (present(p.block_table)) fill(p.num_pages);
  return p;
}

flashonnx_status choose(Plan* plan) {
  plan->resolved = {};
  resolve(plan->given, &plan->resolved);
  plan->asked = at_least_one(plan->resolved.problem);
  return select(plan->asked, &plan->kernel);
}

// Whether the kernel that was chosen adds the projections' biases. Those of new keys, behind a past
// without them, are not the same for all keys.
bool adds_biases(const Plan& plan) {
  return plan.kernel->adds_biases != nullptr && !plan.resolved.concatenate &&
         plan.kernel->adds_biases(plan.asked);
}

// `bound`: for all smaller problems, too, of which another kernel may be chosen.
flashonnx_status make_plan(const Params* params, Plan* plan, bool bound = false) {
  if (params == nullptr)
    return make_status(FLASHONNX_INVALID_ARGUMENT, "FlashAttention: params is null");
  if (params->struct_size != static_cast<int64_t>(sizeof(Params))) {
    return make_status(FLASHONNX_INVALID_ARGUMENT,
                       "FlashAttention: struct_size is expected to be %zu (flashonnx %s), got "
                       "%lld: call flashonnx_attention_init",
                       sizeof(Params), flashonnx_version(),
                       static_cast<long long>(params->struct_size));
  }
  FLASHONNX_RETURN_IF_ERROR(validate(*params));
  plan->given = *params;
  FLASHONNX_RETURN_IF_ERROR(choose(plan));
  if (!has_projection_bias(*params) || (!bound && adds_biases(*plan))) return ok();
  plan->given = with_sums(*params, &plan->sums);
  return choose(plan);
}

flashonnx_status execute(const Params& given, Plan& plan, char* workspace, void* stream) {
  const Params& params = plan.given;
  if (plan.sums.bytes > 0) {
    FLASHONNX_RETURN_IF_ERROR(add_biases(given, plan.sums, workspace, &plan.given, stream));
    plan.resolved = {};
    resolve(plan.given, &plan.resolved);  // the sums have data now
    workspace += plan.sums.bytes;
  }
  FLASHONNX_RETURN_IF_ERROR(prepare(params, &plan.resolved, workspace, stream));
  const Params& p = plan.resolved.problem;
  if (p.batch == 0 || p.q_length == 0 || (present(p.cu_seqlens_q) && p.q_tokens == 0)) return ok();
  workspace += plan.resolved.bytes;
#ifdef FLASHONNX_WITH_CUDA
  if (plan.resolved.prepare && plan.kernel->launch == decode::launch)
    return decode::launch_after_append(p, params, workspace, stream);
#endif
  return plan.kernel->launch(p, workspace, stream);
}

void log_choice(const Plan& plan) {
  if (!log_enabled()) return;
  const Params& p = plan.resolved.problem;
  std::fprintf(
      stderr,
      "flashonnx: %s for B%lld Hq%lld Hkv%lld Sq%lld Sk%lld D%lld Dv%lld dtype %d features %#x\n",
      plan.kernel->name, static_cast<long long>(p.batch), static_cast<long long>(p.q_heads),
      static_cast<long long>(p.kv_heads), static_cast<long long>(p.q_length),
      static_cast<long long>(p.kv_length), static_cast<long long>(p.head_dim),
      static_cast<long long>(p.value_dim), p.q.dtype, required_features(p));
}

#ifdef FLASHONNX_WITH_CUDA
// CUDA has one word for an old driver and for none at all.
flashonnx_status no_device(cudaError_t found) {
  int driver = 0;
  (void)cudaDriverGetVersion(&driver);  // leaves 0 where there is none
  (void)cudaGetLastError();             // a caller's next check is not about this question
  if (driver == 0)
    return make_status(FLASHONNX_RUNTIME_ERROR,
                       "flashonnx_device_query: there is no NVIDIA device or driver here");
  if (found == cudaErrorInsufficientDriver)
    return make_status(
        FLASHONNX_RUNTIME_ERROR,
        "flashonnx_device_query: the NVIDIA driver here is one of CUDA %d.%d, too old for this "
        "library, built with CUDA %d.%d: update the driver, or build flashonnx with an older CUDA",
        driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
  return make_status(FLASHONNX_RUNTIME_ERROR,
                     "flashonnx_device_query: there is no NVIDIA device here (%s)",
                     cudaGetErrorString(found));
}
#endif

}  // namespace

const Kernel* kernels() { return kTable; }

bool log_enabled() {
  static const bool enabled = [] {
    const char* value = std::getenv("FLASHONNX_LOG");
    return value != nullptr && *value != 0 && std::strcmp(value, "0") != 0;
  }();
  return enabled;
}

}  // namespace flashonnx

using namespace flashonnx;

const char* flashonnx_version() { return FLASHONNX_VERSION; }

flashonnx_status flashonnx_device_query(int32_t kind, int32_t ordinal, flashonnx_device* device) {
  if (device == nullptr)
    return make_status(FLASHONNX_INVALID_ARGUMENT, "flashonnx_device_query: device is null");
  *device = {};
  device->kind = kind;
  if (kind == FLASHONNX_CPU) {
    device->sm_count = static_cast<int32_t>(std::thread::hardware_concurrency());
    return ok();
  }
#ifdef FLASHONNX_WITH_CUDA
  if (kind == FLASHONNX_CUDA) {
    int count = 0;
    const cudaError_t found = cudaGetDeviceCount(&count);
    if (found != cudaSuccess || count == 0) return no_device(found);
    if (ordinal < 0) FLASHONNX_CUDA_CHECK(cudaGetDevice(&ordinal));
    int major = 0, minor = 0, shared_memory = 0;
    FLASHONNX_CUDA_CHECK(
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal));
    FLASHONNX_CUDA_CHECK(
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, ordinal));
    FLASHONNX_CUDA_CHECK(
        cudaDeviceGetAttribute(&device->sm_count, cudaDevAttrMultiProcessorCount, ordinal));
    FLASHONNX_CUDA_CHECK(
        cudaDeviceGetAttribute(&shared_memory, cudaDevAttrMaxSharedMemoryPerBlockOptin, ordinal));
    device->ordinal = ordinal;
    device->arch = 10 * major + minor;
    device->shared_memory = shared_memory;
    return ok();
  }
#else
  if (kind == FLASHONNX_CUDA) {
    return make_status(
        FLASHONNX_NOT_IMPLEMENTED,
        "flashonnx_device_query: device %d: this build of the library has no CUDA kernels",
        ordinal);
  }
#endif
  return make_status(FLASHONNX_INVALID_ARGUMENT,
                     "flashonnx_device_query: kind is expected to be 0 (CPU) or 1 (CUDA), got %d",
                     kind);
}

void flashonnx_attention_init(flashonnx_attention_params* params) {
  *params = {};
  params->struct_size = sizeof *params;
  params->mask_keys = -1;
  params->window_left = -1;
  params->window_right = -1;
}

flashonnx_status flashonnx_attention_supported(const flashonnx_attention_params* params) {
  Plan plan;
  FLASHONNX_RETURN_IF_ERROR(make_plan(params, &plan));
  return make_status(FLASHONNX_OK, "%s", plan.kernel->name);
}

flashonnx_status flashonnx_attention_workspace(const flashonnx_attention_params* params,
                                               int64_t* bytes) {
  Plan plan;
  FLASHONNX_RETURN_IF_ERROR(make_plan(params, &plan));
  *bytes = plan.sums.bytes + plan.resolved.bytes +
           (plan.kernel->workspace ? plan.kernel->workspace(plan.asked) : 0);
  return ok();
}

flashonnx_status flashonnx_attention_workspace_bound(const flashonnx_attention_params* maxima,
                                                     int64_t* bytes) {
  Plan plan;
  FLASHONNX_RETURN_IF_ERROR(make_plan(maxima, &plan, true));
  // A smaller problem may select another kernel, so every kernel of the device counts.
  int64_t most = 0;
  for (const Kernel* kernel = kernels(); kernel->name != nullptr; ++kernel) {
    if (kernel->device == maxima->device.kind && kernel->workspace_bound != nullptr) {
      most = std::max(most, kernel->workspace_bound(plan.asked));
    }
  }
  *bytes = plan.sums.bytes + plan.resolved.bytes + most;
  return ok();
}

flashonnx_status flashonnx_attention_run(const flashonnx_attention_params* params, void* workspace,
                                         void* stream) {
  Plan plan;
  FLASHONNX_RETURN_IF_ERROR(make_plan(params, &plan));
  FLASHONNX_RETURN_IF_ERROR(validate_data(*params));
  log_choice(plan);
#ifdef FLASHONNX_WITH_CUDA
  if (params->device.kind == FLASHONNX_CUDA) {
    DeviceGuard guard(params->device.ordinal);
    FLASHONNX_RETURN_IF_ERROR(guard.status());
    return execute(*params, plan, static_cast<char*>(workspace), stream);
  }
#endif
  return execute(*params, plan, static_cast<char*>(workspace), stream);
}

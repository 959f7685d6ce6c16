// RegisterCustomOps: what ONNX Runtime looks up in a custom-op library.
#include <cstdio>
#include <map>
#include <mutex>
#include <vector>

#include "flashonnx/attention.h"
#include "ort/custom_op.h"

namespace flashonnx::ort {
namespace {

constexpr const char* kDomain = "flashonnx";
constexpr int kMajor = 1;
constexpr int kMinor =
    28;  // earlier ones abort in our shape function and ignore function overloads

struct Registration {
  std::vector<CustomOp> ops;
  OrtCustomOpDomain* domain = nullptr;
};

// Made once for each runtime in the process and never freed: sessions keep pointers into it, and at
// exit the runtime that would have to release it may be gone.
OrtStatus* find_domain(const OrtApi& api, OrtCustomOpDomain** domain) {
  static std::mutex mutex;
  static auto& registrations = *new std::map<const OrtApi*, Registration>;
  const std::lock_guard lock(mutex);
  Registration& registration = registrations[&api];
  if (registration.domain == nullptr) {
    OrtCustomOpDomain* made = nullptr;
    registration.ops = custom_ops(api);
    FLASHONNX_ORT_RETURN_IF_ERROR(api.CreateCustomOpDomain(kDomain, &made));
    Handle<OrtCustomOpDomain> half_made(made, api.ReleaseCustomOpDomain);
    for (const CustomOp& op : registration.ops) {
      FLASHONNX_ORT_RETURN_IF_ERROR(api.CustomOpDomain_Add(made, &op));
    }
    registration.domain = half_made.release();
  }
  *domain = registration.domain;
  return nullptr;
}

OrtStatus* check_version(const OrtApiBase& base) {
  const char* found = base.GetVersionString();
  int major = 0, minor = 0;
  const bool parsed = std::sscanf(found, "%d.%d", &major, &minor) == 2;
  if (!parsed || major > kMajor || (major == kMajor && minor >= kMinor)) return nullptr;
  // The status has to come from an API that the old runtime has.
  const uint32_t old = major == 1 && minor < static_cast<int>(kApiVersion) ? minor : kApiVersion;
  const OrtApi* api = base.GetApi(old);
  if (api == nullptr) return nullptr;
  const flashonnx_status status =
      make_status(FLASHONNX_NOT_IMPLEMENTED,
                  "flashonnx %s needs ONNX Runtime %d.%d or newer, found %s: pip install -U "
                  "\"onnxruntime>=%d.%d\" (or onnxruntime-gpu)",
                  flashonnx_version(), kMajor, kMinor, found, kMajor, kMinor);
  return to_ort(*api, status);
}

}  // namespace
}  // namespace flashonnx::ort

extern "C" FLASHONNX_API OrtStatus* ORT_API_CALL RegisterCustomOps(OrtSessionOptions* options,
                                                                   const OrtApiBase* base) {
  using namespace flashonnx::ort;
  FLASHONNX_ORT_RETURN_IF_ERROR(check_version(*base));
  const OrtApi* api = base->GetApi(kApiVersion);
  if (api == nullptr) return nullptr;
  return guarded(*api, [&]() -> OrtStatus* {
    OrtCustomOpDomain* domain = nullptr;
    FLASHONNX_ORT_RETURN_IF_ERROR(find_domain(*api, &domain));
    return api->AddCustomOpDomain(options, domain);
  });
}

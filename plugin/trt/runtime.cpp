#include "trt/runtime.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <string_view>
#include <utility>

#include "kernels/common/status.h"

namespace flashonnx::trt {
namespace {

// Virtual function slots of the Itanium C++ ABI, counted over the class definitions of the
// headers 10.14 and 11.1.
struct Slots {
  int find_logger;
  int log;
  int register_creator;
  int all_creators;
};

constexpr Slots kSlots10 = {0, 0, 12, 13};
constexpr Slots kSlots11 = {4, 4, 8, 9};  // also TensorRT-RTX 1.x

template <typename Result, typename... Arguments>
Result call(void* object, int slot, Arguments... arguments) {
  using Function = Result (*)(void*, Arguments...);
  return (*reinterpret_cast<Function**>(object))[slot](object, arguments...);
}

// A TensorRT library that is loaded in this process.
class Runtime {
 public:
  static Runtime named(const char* library) {
    return Runtime(dlopen(library, RTLD_LAZY | RTLD_NOLOAD));
  }
  // The library that `object`'s virtual functions belong to.
  static Runtime of(void* object) {
    Dl_info info;
    if (dladdr(*static_cast<void**>(object), &info) == 0) return Runtime(nullptr);
    return named(info.dli_fname);
  }

  explicit operator bool() const { return slots_ != nullptr; }
  const Slots& slots() const { return *slots_; }
  void* registry() const { return get("getPluginRegistry"); }
  void* logger() const { return get("getLogger"); }

 private:
  explicit Runtime(void* handle) : handle_(handle) {
    const auto major = handle == nullptr ? nullptr : symbol<int32_t>("getInferLibMajorVersion");
    if (major == nullptr) return;
    // Of a version that is not known here nothing is called; it can still load the library by
    // itself.
    constexpr int32_t kRtx = 1;
    const int32_t version = major();
    if (version == 10) slots_ = &kSlots10;
    if (version == 11 || version == kRtx) slots_ = &kSlots11;
  }

  template <typename Result>
  Result (*symbol(const char* name) const)() {
    return reinterpret_cast<Result (*)()>(dlsym(handle_, name));
  }
  void* get(const char* name) const {
    const auto function = symbol<void*>(name);
    return function == nullptr ? nullptr : function();
  }

  void* handle_;
  const Slots* slots_ = nullptr;
};

constexpr const char* kLibraries[] = {"libnvinfer.so.11", "libnvinfer.so.10",
                                      "libtensorrt_rtx.so.1", "libnvinfer_lean.so.11",
                                      "libnvinfer_lean.so.10"};

std::atomic<void*> logger_finder{nullptr};

std::mutex last_error_mutex;
flashonnx_status last_error{};

void log_to(const Runtime& runtime, void* logger, const char* message) {
  if (logger != nullptr)
    call<void>(logger, runtime.slots().log, nvinfer1::ILogger::Severity::kERROR, message);
}

// Does the registry have a creator of this name, version and namespace, from whatever library?
// Asking for it by name would log an error when it has not.
bool knows(const Runtime& runtime, void* registry, const nvinfer1::IPluginCreatorV3One& creator) {
  using nvinfer1::IPluginCreatorInterface;
  using nvinfer1::IPluginCreatorV3One;
  int32_t count = 0;
  auto* const* all =
      call<IPluginCreatorInterface* const*>(registry, runtime.slots().all_creators, &count);
  return std::any_of(all, all + count, [&](IPluginCreatorInterface* other) {
    if (std::string_view(other->getInterfaceInfo().kind) != creator.getInterfaceInfo().kind)
      return false;
    const auto* same_kind = static_cast<IPluginCreatorV3One*>(other);
    return std::string_view(same_kind->getPluginName()) == creator.getPluginName() &&
           std::string_view(same_kind->getPluginVersion()) == creator.getPluginVersion() &&
           std::string_view(same_kind->getPluginNamespace()) == creator.getPluginNamespace();
  });
}

}  // namespace

void set_logger_finder(void* finder) { logger_finder = finder; }

void log_error(const char* message) noexcept {
  {
    const std::lock_guard lock(last_error_mutex);
    last_error = make_status(FLASHONNX_RUNTIME_ERROR, "%s", message);
  }
  if (void* finder = logger_finder; finder != nullptr) {
    if (const Runtime runtime = Runtime::of(finder)) {
      return log_to(runtime, call<void*>(finder, runtime.slots().find_logger), message);
    }
  }
  for (const char* library : kLibraries) {
    if (const Runtime runtime = Runtime::named(library)) log_to(runtime, runtime.logger(), message);
  }
}

flashonnx_status take_last_error() noexcept {
  const std::lock_guard lock(last_error_mutex);
  return std::exchange(last_error, {});
}

flashonnx_status register_creator(nvinfer1::IPluginCreatorV3One& creator) {
  static std::mutex mutex;  // two threads must not both find the creator missing
  const std::lock_guard lock(mutex);
  bool found = false;
  for (const char* library : kLibraries) {
    const Runtime runtime = Runtime::named(library);
    void* registry = runtime ? runtime.registry() : nullptr;
    if (registry == nullptr) continue;
    found = true;
    if (knows(runtime, registry, creator)) continue;
    if (!call<bool>(registry, runtime.slots().register_creator,
                    static_cast<nvinfer1::IPluginCreatorInterface*>(&creator),
                    creator.getPluginNamespace())) {
      return make_status(FLASHONNX_RUNTIME_ERROR,
                         "FlashAttention: %s refused to register the plugin", library);
    }
  }
  if (found) return ok();
  return make_status(
      FLASHONNX_RUNTIME_ERROR,
      "FlashAttention: no TensorRT 10, 11 or RTX is loaded in this process; load libnvinfer or "
      "libtensorrt_rtx first");
}

}  // namespace flashonnx::trt

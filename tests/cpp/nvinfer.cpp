#include "nvinfer.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

namespace {

using nvinfer1::IPluginCreatorInterface;
using nvinfer1::IPluginCreatorV3One;

std::string errors;

class Logger final : public nvinfer1::ILogger {
 public:
  void log(Severity severity, const char* message) noexcept override {
    if (severity <= Severity::kERROR) errors += (errors.empty() ? "" : "; ") + std::string(message);
  }
} logger;

class LoggerFinder final : public nvinfer1::ILoggerFinder {
 public:
  nvinfer1::ILogger* findLogger() override { return &logger; }
} logger_finder;

// What TensorRT's headers say about loading and registering, for creators of version V3One.
class Registry final : public nvinfer1::IPluginRegistry {
 public:
  bool registerCreator(IPluginCreatorInterface& creator, const char* name_space) noexcept override {
    auto& v3 = static_cast<IPluginCreatorV3One&>(creator);
    if (getCreator(v3.getPluginName(), v3.getPluginVersion(), name_space) != nullptr) return false;
    creators_.push_back(&creator);
    return true;
  }
  IPluginCreatorInterface* const* getAllCreators(int32_t* count) const noexcept override {
    *count = static_cast<int32_t>(creators_.size());
    return creators_.data();
  }
  IPluginCreatorInterface* const* getAllCreatorsRecursive(int32_t* count) noexcept override {
    return getAllCreators(count);
  }
  IPluginCreatorInterface* getCreator(const char* name, const char* version,
                                      const char* name_space) noexcept override {
    for (IPluginCreatorInterface* creator : creators_) {
      auto* v3 = static_cast<IPluginCreatorV3One*>(creator);
      if (std::strcmp(v3->getPluginName(), name) == 0 &&
          std::strcmp(v3->getPluginVersion(), version) == 0 &&
          std::strcmp(v3->getPluginNamespace(), name_space) == 0) {
        return creator;
      }
    }
    return nullptr;
  }
  // Null, and nothing is registered, if any of the library's creators is there already.
  PluginLibraryHandle loadLibrary(const char* path) noexcept override {
    void* library = dlopen(path, RTLD_LAZY);
    if (library == nullptr) {
      errors += dlerror();
      return nullptr;
    }
    using GetCreators = IPluginCreatorInterface* const* (*)(int32_t&);
    using SetLoggerFinder = void (*)(nvinfer1::ILoggerFinder*);
    const auto get_creators = reinterpret_cast<GetCreators>(dlsym(library, "getCreators"));
    const auto set_finder = reinterpret_cast<SetLoggerFinder>(dlsym(library, "setLoggerFinder"));
    if (get_creators == nullptr) return nullptr;
    if (set_finder != nullptr) set_finder(&logger_finder);
    int32_t count = 0;
    auto* const* creators = get_creators(count);
    for (int32_t i = 0; i < count; ++i) {
      auto* v3 = static_cast<IPluginCreatorV3One*>(creators[i]);
      if (!registerCreator(*creators[i], v3->getPluginNamespace())) return nullptr;
    }
    return library;
  }
  void deregisterLibrary(PluginLibraryHandle) noexcept override {}
  bool deregisterCreator(const IPluginCreatorInterface& creator) noexcept override {
    return std::erase(creators_, &creator) != 0;
  }

  nvinfer1::IPluginResource* acquirePluginResource(const char*,
                                                   nvinfer1::IPluginResource*) noexcept override {
    return nullptr;
  }
  int32_t releasePluginResource(const char*) noexcept override { return -1; }
  void setErrorRecorder(nvinfer1::IErrorRecorder*) noexcept override {}
  nvinfer1::IErrorRecorder* getErrorRecorder() const noexcept override { return nullptr; }
  bool isParentSearchEnabled() const override { return true; }
  void setParentSearchEnabled(bool) override {}

  // Of version 2, which we have none of.
  bool registerCreator(nvinfer1::IPluginCreator&, const char*) noexcept override { return false; }
  nvinfer1::IPluginCreator* const* getPluginCreatorList(int32_t* count) const noexcept override {
    *count = 0;
    return nullptr;
  }
  nvinfer1::IPluginCreator* getPluginCreator(const char*, const char*,
                                             const char*) noexcept override {
    return nullptr;
  }
  bool deregisterCreator(const nvinfer1::IPluginCreator&) noexcept override { return false; }

 private:
  std::vector<IPluginCreatorInterface*> creators_;
} registry;

}  // namespace

std::string take_errors() { return std::exchange(errors, {}); }

extern "C" {
nvinfer1::IPluginRegistry* getPluginRegistry() noexcept { return &registry; }
nvinfer1::ILogger* getLogger() noexcept { return &logger; }
int32_t getInferLibMajorVersion() noexcept { return NV_TENSORRT_MAJOR; }
}

// A plugin in the hands of a runtime.
#pragma once

#include <NvInferRuntime.h>

#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "job.h"

struct Deleter {
  void operator()(nvinfer1::IPluginV3* plugin) const { delete plugin; }
};
using Plugin = std::unique_ptr<nvinfer1::IPluginV3, Deleter>;
using BuildCapability = nvinfer1::IPluginV3OneBuildV2;
using RuntimeCapability = nvinfer1::IPluginV3OneRuntime;

template <typename Capability>
Capability& capability(const Plugin& plugin, nvinfer1::PluginCapabilityType type,
                       const char* kind) {
  nvinfer1::IPluginCapability* found = plugin->getCapabilityInterface(type);
  check(found != nullptr, std::string("the plugin has no capability ") + kind);
  check(std::string(found->getInterfaceInfo().kind) == kind,
        std::string("the plugin's capability is not ") + kind);
  return *static_cast<Capability*>(found);
}

inline nvinfer1::IPluginV3OneCore& core(const Plugin& plugin) {
  return capability<nvinfer1::IPluginV3OneCore>(plugin, nvinfer1::PluginCapabilityType::kCORE,
                                                "PLUGIN_V3ONE_CORE");
}
inline BuildCapability& building(const Plugin& plugin) {
  return capability<BuildCapability>(plugin, nvinfer1::PluginCapabilityType::kBUILD,
                                     "PLUGIN_V3ONE_BUILD");
}
inline RuntimeCapability& running(const Plugin& plugin) {
  return capability<RuntimeCapability>(plugin, nvinfer1::PluginCapabilityType::kRUNTIME,
                                       "PLUGIN_V3ONE_RUNTIME");
}

// Null if the creator refuses.
Plugin create(nvinfer1::IPluginCreatorV3One& creator, const std::vector<Field>& fields,
              nvinfer1::TensorRTPhase phase);
Plugin copy(const Plugin& plugin);
std::vector<Field> serialized(const Plugin& plugin);

// What an engine keeps of a plugin.
struct Plan {
  std::vector<Field> fields;
  std::vector<size_t> workspaces;  // for each set of shapes
  size_t workspace = 0;            // that every context gets: for the largest
};

// Everything that a builder asks, in its order. The plan does not depend on the plugin any more.
Plan build(Plugin plugin, const Job& job);

// The plugin that an engine has once it is loaded.
Plugin restore(nvinfer1::IPluginCreatorV3One& creator, const Plan& plan);

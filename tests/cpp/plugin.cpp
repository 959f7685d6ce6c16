#include "plugin.h"

using nvinfer1::TensorRTPhase;

Plugin create(nvinfer1::IPluginCreatorV3One& creator, const std::vector<Field>& fields,
              TensorRTPhase phase) {
  std::vector<nvinfer1::PluginField> views;
  for (const Field& field : fields) views.push_back(field.view());
  const nvinfer1::PluginFieldCollection collection{static_cast<int32_t>(views.size()),
                                                   views.data()};
  Plugin plugin(creator.createPlugin("attention", &collection, phase));
  if (plugin == nullptr) return plugin;
  check(std::string(core(plugin).getPluginName()) == creator.getPluginName() &&
            std::string(core(plugin).getPluginVersion()) == creator.getPluginVersion() &&
            std::string(core(plugin).getPluginNamespace()) == creator.getPluginNamespace(),
        "plugin and creator do not have the same name");
  return plugin;
}

Plugin copy(const Plugin& plugin) {
  Plugin result(plugin->clone());
  check(result != nullptr, "clone failed");
  return result;
}

std::vector<Field> serialized(const Plugin& plugin) {
  const nvinfer1::PluginFieldCollection* fields = running(plugin).getFieldsToSerialize();
  check(fields != nullptr, "getFieldsToSerialize failed");
  std::vector<Field> result;
  for (int32_t i = 0; i < fields->nbFields; ++i) {
    const nvinfer1::PluginField& field = fields->fields[i];
    result.emplace_back(field.name, field.type, field.data, field.length);
  }
  return result;
}

Plugin restore(nvinfer1::IPluginCreatorV3One& creator, const Plan& plan) {
  Plugin plugin = create(creator, plan.fields, TensorRTPhase::kRUNTIME);
  check(plugin != nullptr, "the plugin cannot be made from what it serialised");
  check(serialized(plugin) == plan.fields, "the restored plugin serialises to something else");
  return plugin;
}

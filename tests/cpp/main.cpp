// A host for libflashonnx.so's TensorRT plugin that calls it as TensorRT 10 does, without TensorRT.
//
//   trt_host LIBRARY JOBS                          the builder's part alone (no GPU needed)
//   trt_host LIBRARY JOBS INPUTS OUTPUTS [tight]   the runtime's part too; tight: memory without
//                                                  guards, for compute-sanitizer
//
// LIBRARY may be libflashonnx.so, which is loaded as a plugin library, or
// libflashonnx_trt_autoload.so, which is only opened. Results go to standard output, a line of
// "job ID" and then what came of it; a crash is the only failure of the program itself.
#include <dlfcn.h>

#include <cstring>
#include <fstream>
#include <iostream>

#include "nvinfer.h"
#include "plugin.h"
#include "run.h"

namespace {

nvinfer1::IPluginCreatorV3One& find_creator(const std::string& library) {
  nvinfer1::IPluginRegistry& registry = *getPluginRegistry();
  if (library.ends_with("_autoload.so")) {
    if (dlopen(library.c_str(), RTLD_LAZY) == nullptr) throw std::runtime_error(dlerror());
  } else {
    check(registry.loadLibrary(library.c_str()) != nullptr, library + ": " + take_errors());
    check(registry.loadLibrary(library.c_str()) == nullptr, "the library was loaded twice");
  }
  auto* creator = registry.getCreator("FlashAttention", "1", "flashonnx");
  check(creator != nullptr, library + " did not register FlashAttention: " + take_errors());
  check(std::string(creator->getInterfaceInfo().kind) == "PLUGIN CREATOR_V3ONE", "creator's kind");
  return *static_cast<nvinfer1::IPluginCreatorV3One*>(creator);
}

void do_job(nvinfer1::IPluginCreatorV3One& creator, const Job& job, std::istream* inputs,
            std::ostream* outputs, bool guards) {
  std::cout << "job " << job.id << "\n";
  try {
    Plugin plugin = create(creator, job.fields, nvinfer1::TensorRTPhase::kBUILD);
    check(plugin != nullptr, "refused by the creator");
    if (job.shapes.empty()) {
      for (const Field& field : serialized(plugin)) std::cout << "field " << field.text() << "\n";
      return;
    }
    const Plan plan = build(std::move(plugin), job);
    for (const Field& field : plan.fields) std::cout << "field " << field.text() << "\n";
    for (size_t size : plan.workspaces) std::cout << "workspace " << size << "\n";
    const Plugin engine = restore(creator, plan);
    if (outputs != nullptr) run(engine, plan, job, *inputs, *outputs, guards);
    const std::string errors = take_errors();
    check(errors.empty(), errors);
  } catch (const std::exception& error) {
    std::cout << "failed " << error.what() << ": " << take_errors() << "\n";
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3 && count != 5 && count != 6) {
    std::cerr << "trt_host LIBRARY JOBS [INPUTS OUTPUTS [tight]]\n";
    return 2;
  }
  try {
    nvinfer1::IPluginCreatorV3One& creator = find_creator(arguments[1]);
    std::ifstream jobs(arguments[2]), inputs;
    std::ofstream outputs;
    if (count > 3) {
      inputs.open(arguments[3], std::ios::binary);
      outputs.open(arguments[4], std::ios::binary);
    }
    const bool guards = count < 6;
    for (const Job& job : read_jobs(jobs)) {
      do_job(creator, job, &inputs, count > 3 ? &outputs : nullptr, guards);
    }
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "trt_host: " << error.what() << "\n";
    return 1;
  }
}

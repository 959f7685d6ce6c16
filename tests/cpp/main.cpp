// A host for libflashonnx.so's TensorRT plugin that calls it as TensorRT 10 does, without TensorRT.
//
//   trt_host LIBRARY [tight]
//
// LIBRARY may be libflashonnx.so, which is loaded as a plugin library, or
// libflashonnx_trt_autoload.so, which is only opened. Device memory has guards on either side, but
// for compute-sanitizer ("tight"). Jobs come by standard input: the lines of job.h, then
//
//   go                   the builder's part, which needs no GPU
//   go INPUTS OUTPUTS    the runtime's part too: files with the contents of tensors, in their order
//
// What came of a job goes to standard output and ends with the line "done".
#include <dlfcn.h>

#include <fstream>
#include <iostream>
#include <sstream>

#include "nvinfer.h"
#include "plugin.h"
#include "run.h"

namespace {

void open_library(const std::string& library) {
  nvinfer1::IPluginRegistry& registry = *getPluginRegistry();
  if (library.ends_with("_autoload.so")) {
    if (dlopen(library.c_str(), RTLD_LAZY) == nullptr) throw std::runtime_error(dlerror());
  } else {
    check(registry.loadLibrary(library.c_str()) != nullptr, library + ": " + take_errors());
    check(registry.loadLibrary(library.c_str()) == nullptr, "the library was loaded twice");
  }
}

nvinfer1::IPluginCreatorV3One& find_creator(const std::string& name) {
  auto* creator = getPluginRegistry()->getCreator(name.c_str(), "1", "flashonnx");
  check(creator != nullptr, name + " is not registered: " + take_errors());
  check(std::string(creator->getInterfaceInfo().kind) == "PLUGIN CREATOR_V3ONE", "creator's kind");
  return *static_cast<nvinfer1::IPluginCreatorV3One*>(creator);
}

void do_job(const Job& job, std::istream& files, bool guards) {
  nvinfer1::IPluginCreatorV3One& creator = find_creator(job.op);
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
  if (std::string inputs, outputs; files >> inputs >> outputs) {
    std::ifstream in(inputs, std::ios::binary);
    std::ofstream out(outputs, std::ios::binary);
    run(engine, plan, job, in, out, guards);
  }
  check(take_errors().empty(), "something was logged");
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 2) {
    std::cerr << "trt_host LIBRARY [tight]\n";
    return 2;
  }
  try {
    open_library(arguments[1]);
    find_creator("FlashAttention");
    Job job;
    for (std::string line; std::getline(std::cin, line);) {
      if (!line.starts_with("go")) {
        read_line(line, &job);
        continue;
      }
      try {
        std::istringstream files(line.substr(2));
        do_job(job, files, count == 2);
      } catch (const std::exception& error) {
        std::cout << "failed " << error.what() << ": " << take_errors() << "\n";
      }
      std::cout << "done" << std::endl;
      job = {};
    }
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "trt_host: " << error.what() << "\n";
    return 1;
  }
}

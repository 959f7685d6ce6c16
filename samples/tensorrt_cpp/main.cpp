// Runs an engine that contains FlashAttention: loads the plugin library, the engine, and calls it
// once with random inputs.
//
//   run_engine libflashonnx.so encoder.engine [INPUT=2x100x256 ...]
//
// `python -c "import flashonnx; print(flashonnx.library_path())"` names the library. Dynamic
// dimensions of inputs that are not named are those of the profile's optimum.
#include <NvInfer.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <memory>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

class Logger final : public nvinfer1::ILogger {
  void log(Severity severity, const char* message) noexcept override {
    if (severity <= Severity::kWARNING) std::cerr << message << "\n";
  }
};

void check(bool good, const std::string& what) {
  if (!good) throw std::runtime_error(what + " failed");
}

std::vector<char> read_file(const char* path) {
  std::ifstream file(path, std::ios::binary);
  check(file.good(), std::string("opening ") + path);
  return {std::istreambuf_iterator<char>(file), {}};
}

nvinfer1::Dims parse_shape(const std::string& text) {
  nvinfer1::Dims dims{};
  std::istringstream in(text);
  for (std::string size; std::getline(in, size, 'x');) dims.d[dims.nbDims++] = std::stoll(size);
  return dims;
}

size_t bytes_of(const nvinfer1::Dims& dims, nvinfer1::DataType type) {
  size_t bytes = 4;
  if (type == nvinfer1::DataType::kHALF || type == nvinfer1::DataType::kBF16) bytes = 2;
  if (type == nvinfer1::DataType::kINT64) bytes = 8;
  if (type == nvinfer1::DataType::kBOOL || type == nvinfer1::DataType::kINT8) bytes = 1;
  for (int i = 0; i < dims.nbDims; ++i) bytes *= static_cast<size_t>(dims.d[i]);
  return bytes;
}

// Device memory filled with small numbers of whatever type: bytes whose top bits are zero.
void* random_memory(size_t bytes) {
  std::vector<unsigned char> host(bytes);
  std::mt19937 random(0);
  std::generate(host.begin(), host.end(), [&] { return random() & 0x3f; });
  void* device = nullptr;
  check(cudaMalloc(&device, std::max<size_t>(bytes, 1)) == cudaSuccess, "cudaMalloc");
  check(cudaMemcpy(device, host.data(), bytes, cudaMemcpyHostToDevice) == cudaSuccess, "copy");
  return device;
}

void run(nvinfer1::ICudaEngine& engine, const std::map<std::string, nvinfer1::Dims>& shapes) {
  const std::unique_ptr<nvinfer1::IExecutionContext> context(engine.createExecutionContext());
  check(context != nullptr, "createExecutionContext");
  std::vector<const char*> names;
  for (int32_t i = 0; i < engine.getNbIOTensors(); ++i) names.push_back(engine.getIOTensorName(i));
  for (const char* name : names) {
    if (engine.getTensorIOMode(name) != nvinfer1::TensorIOMode::kINPUT) continue;
    const auto given = shapes.find(name);
    const auto shape = given != shapes.end()
                           ? given->second
                           : engine.getProfileShape(name, 0, nvinfer1::OptProfileSelector::kOPT);
    check(context->setInputShape(name, shape), std::string("setting the shape of ") + name);
  }
  for (const char* name : names) {
    const size_t bytes = bytes_of(context->getTensorShape(name), engine.getTensorDataType(name));
    check(context->setTensorAddress(name, random_memory(bytes)), "setTensorAddress");
    std::cout << name << ": " << bytes << " bytes\n";
  }
  cudaStream_t stream = nullptr;
  check(cudaStreamCreate(&stream) == cudaSuccess, "cudaStreamCreate");
  check(context->enqueueV3(stream), "enqueueV3");
  check(cudaStreamSynchronize(stream) == cudaSuccess, "the engine");
  std::cout << "done\n";
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 3) {
    std::cerr << "run_engine libflashonnx.so ENGINE [INPUT=2x100x256 ...]\n";
    return 2;
  }
  try {
    std::map<std::string, nvinfer1::Dims> shapes;
    for (int i = 3; i < count; ++i) {
      const std::string text = arguments[i];
      const size_t equals = text.rfind('=');
      check(equals != std::string::npos, "reading " + text);
      shapes[text.substr(0, equals)] = parse_shape(text.substr(equals + 1));
    }
    Logger logger;
    const std::unique_ptr<nvinfer1::IRuntime> runtime(nvinfer1::createInferRuntime(logger));
    check(runtime != nullptr, "createInferRuntime");
    // Once for each process; null if the plugin is there already.
    check(runtime->getPluginRegistry().loadLibrary(arguments[1]) != nullptr, "loadLibrary");
    const std::vector<char> plan = read_file(arguments[2]);
    const std::unique_ptr<nvinfer1::ICudaEngine> engine(
        runtime->deserializeCudaEngine(plan.data(), plan.size()));
    check(engine != nullptr, "deserializeCudaEngine");
    run(*engine, shapes);
    return 0;
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}

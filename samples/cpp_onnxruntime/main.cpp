// Runs a fused model in ONNX Runtime from C++: with the library, whose kernels then do the
// attention, and without it, when the standard operators that the file carries do. Compares the
// two.
//
//     main fused.onnx libflashonnx.so
//
// Inputs are float32 and filled with made-up numbers; axes without a size get 16.

#include <onnxruntime_cxx_api.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

namespace {

constexpr int64_t kSize = 16;
constexpr float kTolerance = 1e-4f;

// All float32 outputs, one after the other.
std::vector<float> run(Ort::Env& env, const char* model, const char* library) {
  Ort::SessionOptions options;
  // Once per session options; ONNX Runtime keeps the library open as long as it is needed.
  if (library != nullptr) options.RegisterCustomOpsLibrary(library);
  Ort::Session session(env, model, options);

  Ort::AllocatorWithDefaultOptions allocator;
  const auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
  std::vector<std::string> names;
  std::vector<std::vector<float>> data;
  std::vector<Ort::Value> inputs;
  for (size_t i = 0; i < session.GetInputCount(); ++i) {
    names.emplace_back(session.GetInputNameAllocated(i, allocator).get());
    std::vector<int64_t> shape = session.GetInputTypeInfo(i).GetTensorTypeAndShapeInfo().GetShape();
    size_t count = 1;
    for (int64_t& size : shape) count *= size = size < 0 ? kSize : size;
    std::vector<float>& values = data.emplace_back(count);
    for (size_t j = 0; j < count; ++j) values[j] = std::sin(0.37f * (j + 1) + i);
    inputs.push_back(
        Ort::Value::CreateTensor<float>(memory, values.data(), count, shape.data(), shape.size()));
  }
  const size_t first_output = names.size();
  for (size_t i = 0; i < session.GetOutputCount(); ++i)
    names.emplace_back(session.GetOutputNameAllocated(i, allocator).get());
  std::vector<const char*> pointers;
  for (const std::string& name : names) pointers.push_back(name.c_str());

  const std::vector<Ort::Value> outputs =
      session.Run(Ort::RunOptions{nullptr}, pointers.data(), inputs.data(), inputs.size(),
                  pointers.data() + first_output, names.size() - first_output);
  std::vector<float> all;
  for (const Ort::Value& output : outputs) {
    const float* values = output.GetTensorData<float>();
    all.insert(all.end(), values, values + output.GetTensorTypeAndShapeInfo().GetElementCount());
  }
  return all;
}

int compare(const char* model, const char* library) {
  Ort::Env env(ORT_LOGGING_LEVEL_WARNING, "flashonnx");
  const std::vector<float> fused = run(env, model, library);
  const std::vector<float> standard = run(env, model, nullptr);
  float worst = 0;
  for (size_t i = 0; i < fused.size(); ++i) {
    const float difference = std::abs(fused[i] - standard[i]);
    worst = std::isnan(difference) ? INFINITY : std::max(worst, difference);
  }
  std::printf("%zu numbers, largest difference with and without the library: %.2e\n", fused.size(),
              worst);
  return worst < kTolerance ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: main fused.onnx libflashonnx.so\n");
    return 2;
  }
  try {
    return compare(argv[1], argv[2]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}

#include "run.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <memory>

namespace {

using nvinfer1::PluginTensorDesc;

void check_cuda(cudaError_t error, const char* what) {
  check(error == cudaSuccess, std::string(what) + ": " + cudaGetErrorString(error));
}

// Device memory between two guards, all bits set: NaN in every floating-point type.
class Memory {
 public:
  Memory(size_t size, bool guards) : size_(size), guard_(guards ? 4096 : 0) {
    check_cuda(cudaMalloc(&base_, std::max<size_t>(size_ + 2 * guard_, 1)), "cudaMalloc");
    clear();
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { static_cast<void>(cudaFree(base_)); }

  // Null for an empty tensor: TensorRT gives some plugins that.
  void* data() const { return size_ == 0 ? nullptr : static_cast<char*>(base_) + guard_; }
  // Both wait: other streams do not wait for the default one.
  void clear() {
    check_cuda(cudaMemset(base_, 0xff, size_ + 2 * guard_), "cudaMemset");
    check_cuda(cudaDeviceSynchronize(), "cudaMemset");
  }
  void write(const std::vector<char>& bytes) {
    if (size_ == 0) return;
    check_cuda(cudaMemcpy(data(), bytes.data(), size_, cudaMemcpyHostToDevice), "cudaMemcpy");
    check_cuda(cudaDeviceSynchronize(), "cudaMemcpy");
  }
  std::vector<char> read() const {
    std::vector<char> all(size_ + 2 * guard_);
    check_cuda(cudaMemcpy(all.data(), base_, all.size(), cudaMemcpyDeviceToHost), "cudaMemcpy");
    const auto untouched = [](char byte) { return byte == static_cast<char>(0xff); };
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(guard_);
    const auto end = begin + static_cast<std::ptrdiff_t>(size_);
    check(std::all_of(all.begin(), begin, untouched), "memory before a tensor was written");
    check(std::all_of(end, all.end(), untouched), "memory after a tensor was written");
    return {begin, end};
  }

 private:
  void* base_ = nullptr;
  size_t size_;
  size_t guard_;
};

class Stream {
 public:
  Stream() { check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream"); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream() { static_cast<void>(cudaStreamDestroy(stream_)); }
  operator cudaStream_t() const { return stream_; }
  void wait() const { check_cuda(cudaStreamSynchronize(stream_), "the stream"); }

 private:
  cudaStream_t stream_ = nullptr;
};

std::vector<PluginTensorDesc> described(const std::vector<Tensor>& tensors) {
  std::vector<PluginTensorDesc> descs;
  for (const Tensor& tensor : tensors) {
    descs.push_back({tensor.dims, tensor.type, nvinfer1::TensorFormat::kLINEAR, 1.0F});
  }
  return descs;
}

// A set of shapes with memory for its tensors.
class Bindings {
 public:
  Bindings(const ShapeSet& shapes, const std::vector<std::vector<char>>& contents, bool guards)
      : input_descs_(described(shapes.inputs)), output_descs_(described(shapes.outputs)) {
    for (size_t i = 0; i < shapes.inputs.size(); ++i) {
      inputs_.push_back(std::make_unique<Memory>(contents[i].size(), guards));
      inputs_.back()->write(contents[i]);
    }
    for (const Tensor& output : shapes.outputs) {
      outputs_.push_back(std::make_unique<Memory>(output.bytes(), guards));
    }
  }
  void clear_outputs() {
    for (auto& output : outputs_) output->clear();
  }
  std::vector<char> outputs() const {
    std::vector<char> all;
    for (const auto& output : outputs_) {
      const std::vector<char> bytes = output->read();
      all.insert(all.end(), bytes.begin(), bytes.end());
    }
    return all;
  }
  void announce(RuntimeCapability& plugin) const {
    check(plugin.onShapeChange(input_descs_.data(), count(input_descs_), output_descs_.data(),
                               count(output_descs_)) == 0,
          "onShapeChange failed");
  }
  void enqueue(RuntimeCapability& plugin, void* workspace, cudaStream_t stream) const {
    std::vector<const void*> inputs;
    std::vector<void*> outputs;
    for (const auto& memory : inputs_) inputs.push_back(memory->data());
    for (const auto& memory : outputs_) outputs.push_back(memory->data());
    check(plugin.enqueue(input_descs_.data(), output_descs_.data(), inputs.data(), outputs.data(),
                         workspace, stream) == 0,
          "enqueue failed");
  }

 private:
  static int32_t count(const std::vector<PluginTensorDesc>& descs) {
    return static_cast<int32_t>(descs.size());
  }

  std::vector<PluginTensorDesc> input_descs_, output_descs_;
  std::vector<std::unique_ptr<Memory>> inputs_, outputs_;
};

class Resources final : public nvinfer1::IPluginResourceContext {
 public:
  nvinfer1::IGpuAllocator* getGpuAllocator() const noexcept override { return nullptr; }
  nvinfer1::IErrorRecorder* getErrorRecorder() const noexcept override { return nullptr; }
};

// An execution context: a plugin, a stream and workspace of its own.
class Context {
 public:
  Context(const Plugin& engine, size_t workspace, bool guards)
      : workspace_(workspace, guards), plugin_(running(engine).attachToContext(&resources_)) {
    check(plugin_ != nullptr, "attachToContext failed");
  }
  void announce(const Bindings& bindings) const { bindings.announce(running(plugin_)); }
  void enqueue(const Bindings& bindings) const {
    bindings.enqueue(running(plugin_), workspace_.data(), stream_);
  }
  void wait() const {
    stream_.wait();
    static_cast<void>(workspace_.read());  // its guards
  }
  // Strictest: nothing unsafe may happen anywhere in the process meanwhile.
  void capture_and_replay(const Bindings& bindings, int times) const {
    check_cuda(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), "begin of capture");
    enqueue(bindings);
    cudaGraph_t graph = nullptr;
    check_cuda(cudaStreamEndCapture(stream_, &graph), "capture");
    cudaGraphExec_t executable = nullptr;
    check_cuda(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
    for (int i = 0; i < times; ++i) check_cuda(cudaGraphLaunch(executable, stream_), "graph");
    wait();
    check_cuda(cudaGraphExecDestroy(executable), "cudaGraphExecDestroy");
    check_cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
  }

 private:
  Resources resources_;
  Memory workspace_;
  Stream stream_;
  Plugin plugin_;
};

std::vector<std::vector<char>> read_contents(const ShapeSet& shapes, std::istream& in) {
  std::vector<std::vector<char>> contents;
  for (const Tensor& input : shapes.inputs) {
    std::vector<char>& bytes = contents.emplace_back(input.bytes());
    in.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    check(in.good(), "the inputs end too early");
  }
  return contents;
}

void check_same(const Bindings& bindings, const std::vector<char>& expected, const char* when) {
  check(bindings.outputs() == expected, std::string("other results ") + when);
}

}  // namespace

void run(const Plugin& plugin, const Plan& plan, const Job& job, std::istream& inputs,
         std::ostream& outputs, bool guards) {
  std::vector<std::unique_ptr<Bindings>> sets, moved;
  for (const ShapeSet& shapes : job.shapes) {
    if (!shapes.run) continue;
    const auto contents = read_contents(shapes, inputs);
    sets.push_back(std::make_unique<Bindings>(shapes, contents, guards));
    moved.push_back(std::make_unique<Bindings>(shapes, contents, guards));
  }
  const Context captured(plugin, plan.workspace, guards);
  captured.announce(*sets[0]);
  captured.capture_and_replay(*sets[0], 2);
  const std::vector<char> replayed = sets[0]->outputs();
  sets[0]->clear_outputs();

  std::vector<std::unique_ptr<Context>> contexts;
  for (const auto& set : sets) {
    contexts.push_back(std::make_unique<Context>(plugin, plan.workspace, guards));
    contexts.back()->announce(*set);
  }
  for (size_t i = 0; i < sets.size(); ++i) contexts[i]->enqueue(*sets[i]);
  for (const auto& context : contexts) context->wait();
  check_same(*sets[0], replayed, "in a graph");

  std::vector<std::vector<char>> results;
  for (size_t i = 0; i < sets.size(); ++i) {
    results.push_back(sets[i]->outputs());
    outputs.write(results[i].data(), static_cast<std::streamsize>(results[i].size()));
    contexts[i]->announce(*moved[i]);
    contexts[i]->enqueue(*moved[i]);
    contexts[i]->wait();
    check_same(*moved[i], results[i], "at other addresses");
  }
  for (size_t i = 0; i < sets.size(); ++i) {
    moved[i]->clear_outputs();
    captured.announce(*moved[i]);
    captured.enqueue(*moved[i]);
    captured.wait();
    check_same(*moved[i], results[i], "in a context that had other shapes");
  }
}

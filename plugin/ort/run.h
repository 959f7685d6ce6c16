// One run of a node: its tensors become the seam's struct, its workspace comes from the session.
#pragma once

#include <vector>

#include "operator/geometry.h"
#include "ort/kernel.h"

namespace flashonnx::ort {

struct Tensor {
  Shape shape;
  void* data = nullptr;
  int32_t dtype = FLASHONNX_NONE;
};

class Run {
 public:
  // `read` and `set_device` come first, then the operator describes and binds, then `execute`.
  Run(const Kernel& kernel, OrtKernelContext* context)
      : kernel_(kernel), api_(kernel.api), context_(context), in_(kernel.op.input_count) {}

  // All inputs, and the device.
  OrtStatus* read();

  const Tensor& input(size_t index) const { return in_[index]; }
  const Shape& shape(size_t index) const { return in_[index].shape; }
  flashonnx_attention_params& params() { return params_; }

  // INVALID_ARGUMENT unless the input, if it is there, is of a dtype among the bits.
  OrtStatus* check_dtype(size_t index, const char* name, uint32_t dtypes,
                         const char* expected) const;

  // Points the tensor to an input, from element `offset` on; absent inputs leave it absent.
  void bind(size_t index, flashonnx_tensor* tensor, int64_t offset = 0) const;

  // Points the tensor to an output, if the node has it.
  OrtStatus* bind_output(size_t index, const Shape& shape, int32_t dtype, flashonnx_tensor* tensor);

  // Runs the problem, with workspace of the session's.
  OrtStatus* execute();

 private:
  OrtStatus* read_input(const OrtValue& value, Tensor* tensor);
  OrtStatus* set_device();
  static void parallel_for(void* context, int64_t count, void (*body)(void*, int64_t), void* data);

  const Kernel& kernel_;
  const OrtApi& api_;
  OrtKernelContext* context_;
  const OrtMemoryInfo* memory_ = nullptr;
  void* stream_ = nullptr;
  std::vector<Tensor> in_;
  flashonnx_attention_params params_;
};

}  // namespace flashonnx::ort

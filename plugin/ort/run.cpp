#include "ort/run.h"

#include <algorithm>
#include <mutex>

namespace flashonnx::ort {

int32_t dtype_of(ONNXTensorElementDataType type) {
  switch (type) {
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT:
      return FLASHONNX_FLOAT32;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16:
      return FLASHONNX_FLOAT16;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16:
      return FLASHONNX_BFLOAT16;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL:
      return FLASHONNX_BOOL;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32:
      return FLASHONNX_INT32;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64:
      return FLASHONNX_INT64;
    default:
      return FLASHONNX_NONE;
  }
}

namespace {

// Queried once a device: the attributes of a device never change.
flashonnx_status query_device(int32_t kind, int32_t ordinal, flashonnx_device* device) {
  static std::mutex mutex;
  static std::vector<flashonnx_device> known;
  const std::lock_guard lock(mutex);
  for (const flashonnx_device& entry : known) {
    if (entry.kind != kind || entry.ordinal != ordinal) continue;
    *device = entry;
    return ok();
  }
  FLASHONNX_RETURN_IF_ERROR(flashonnx_device_query(kind, ordinal, device));
  known.push_back(*device);
  return ok();
}

int64_t element_size(int32_t dtype) {
  if (dtype == FLASHONNX_BOOL) return 1;
  if (dtype == FLASHONNX_INT64) return 8;
  return dtype == FLASHONNX_FLOAT32 || dtype == FLASHONNX_INT32 ? 4 : 2;
}

}  // namespace

OrtStatus* Run::read() {
  flashonnx_attention_init(&params_);
  size_t count = 0;
  FLASHONNX_ORT_RETURN_IF_ERROR(api_.KernelContext_GetInputCount(context_, &count));
  for (size_t i = 0; i < in_.size() && i < count; ++i) {
    const OrtValue* value = nullptr;
    FLASHONNX_ORT_RETURN_IF_ERROR(api_.KernelContext_GetInput(context_, i, &value));
    if (value != nullptr) FLASHONNX_ORT_RETURN_IF_ERROR(read_input(*value, &in_[i]));
  }
  return set_device();
}

OrtStatus* Run::read_input(const OrtValue& value, Tensor* tensor) {
  OrtTensorTypeAndShapeInfo* info = nullptr;
  FLASHONNX_ORT_RETURN_IF_ERROR(api_.GetTensorTypeAndShape(&value, &info));
  const Handle<OrtTensorTypeAndShapeInfo> handle(info, api_.ReleaseTensorTypeAndShapeInfo);
  ONNXTensorElementDataType type;
  FLASHONNX_ORT_RETURN_IF_ERROR(api_.GetTensorElementType(info, &type));
  tensor->dtype = dtype_of(type);
  tensor->shape.present = true;
  FLASHONNX_ORT_RETURN_IF_ERROR(api_.GetDimensionsCount(info, &tensor->shape.rank));
  const size_t kept = std::min(tensor->shape.rank, kMaxRank);
  FLASHONNX_ORT_RETURN_IF_ERROR(api_.GetDimensions(info, tensor->shape.dims.data(), kept));
  // Inputs are only read; the seam has one tensor type for inputs and outputs.
  return api_.GetTensorMutableData(const_cast<OrtValue*>(&value), &tensor->data);
}

// The device is the one that Q lies on, which the calling thread's current one need not be.
OrtStatus* Run::set_device() {
  const OrtValue* q = nullptr;
  FLASHONNX_ORT_RETURN_IF_ERROR(api_.KernelContext_GetInput(context_, 0, &q));
  FLASHONNX_ORT_RETURN_IF_ERROR(api_.GetTensorMemoryInfo(q, &memory_));
  int ordinal = 0;
  if (kernel_.kind == FLASHONNX_CUDA) {
    FLASHONNX_ORT_RETURN_IF_ERROR(api_.MemoryInfoGetId(memory_, &ordinal));
    FLASHONNX_ORT_RETURN_IF_ERROR(api_.KernelContext_GetGPUComputeStream(context_, &stream_));
  }
  return to_ort(api_, query_device(kernel_.kind, ordinal, &params_.device));
}

OrtStatus* Run::check_dtype(size_t index, const char* name, uint32_t dtypes,
                            const char* expected) const {
  const Tensor& tensor = in_[index];
  if (!tensor.shape.present || (tensor.dtype != FLASHONNX_NONE && dtypes & 1u << tensor.dtype))
    return nullptr;
  return to_ort(api_, make_status(FLASHONNX_INVALID_ARGUMENT,
                                  "FlashAttention: input '%s' is expected to be %s, got another "
                                  "type",
                                  name, expected));
}

void Run::bind(size_t index, flashonnx_tensor* tensor, int64_t offset) const {
  const Tensor& input = in_[index];
  tensor->dtype = input.dtype;
  if (input.data == nullptr) return;
  tensor->data = static_cast<char*>(input.data) + offset * element_size(input.dtype);
}

OrtStatus* Run::bind_output(size_t index, const Shape& shape, int32_t dtype,
                            flashonnx_tensor* tensor) {
  size_t count = 0;
  OrtValue* value = nullptr;
  FLASHONNX_ORT_RETURN_IF_ERROR(api_.KernelContext_GetOutputCount(context_, &count));
  if (index >= count) return nullptr;
  FLASHONNX_ORT_RETURN_IF_ERROR(
      api_.KernelContext_GetOutput(context_, index, shape.dims.data(), shape.rank, &value));
  if (value == nullptr) return nullptr;  // not asked for
  tensor->dtype = dtype;
  return api_.GetTensorMutableData(value, &tensor->data);
}

OrtStatus* Run::execute() {
  if (kernel_.kind == FLASHONNX_CPU) {
    params_.parallel_for = parallel_for;
    params_.parallel_context = this;
  }
  int64_t bytes = 0;
  FLASHONNX_ORT_RETURN_IF_ERROR(to_ort(api_, flashonnx_attention_workspace(&params_, &bytes)));
  if (bytes == 0) return to_ort(api_, flashonnx_attention_run(&params_, nullptr, stream_));

  OrtAllocator* allocator = nullptr;
  FLASHONNX_ORT_RETURN_IF_ERROR(api_.KernelContext_GetAllocator(context_, memory_, &allocator));
  const Handle<OrtAllocator> handle(allocator, api_.ReleaseAllocator);
  void* workspace = nullptr;
  if (stream_ == nullptr) {  // the call below would crash
    workspace = allocator->Alloc(allocator, static_cast<size_t>(bytes));
  } else {
    // Of this run's stream, so that a run on another stream is not handed it while it is in use.
    FLASHONNX_ORT_RETURN_IF_ERROR(api_.KernelContext_GetScratchBuffer(
        context_, memory_, static_cast<size_t>(bytes), &workspace));
  }
  if (workspace == nullptr) {
    return to_ort(api_, make_status(FLASHONNX_RUNTIME_ERROR,
                                    "FlashAttention: no memory for a workspace of %lld bytes",
                                    static_cast<long long>(bytes)));
  }
  const flashonnx_status status = flashonnx_attention_run(&params_, workspace, stream_);
  // The work may still be queued: what comes next on the stream comes after it.
  allocator->Free(allocator, workspace);
  return to_ort(api_, status);
}

// The session's threads; on this thread alone if the runtime refuses.
void Run::parallel_for(void* context, int64_t count, void (*body)(void*, int64_t), void* data) {
  struct Job {
    void (*body)(void*, int64_t);
    void* data;
  } job{body, data};
  const Run& run = *static_cast<const Run*>(context);
  const auto call = [](void* job, size_t index) {
    const Job& work = *static_cast<const Job*>(job);
    work.body(work.data, static_cast<int64_t>(index));
  };
  if (!succeeded(run.api_, run.api_.KernelContext_ParallelFor(
                               run.context_, call, static_cast<size_t>(count), 0, &job))) {
    for (int64_t i = 0; i < count; ++i) body(data, i);
  }
}

}  // namespace flashonnx::ort

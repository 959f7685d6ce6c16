// One run of a node: its tensors become the seam's struct, its workspace comes from the session.
#include <algorithm>
#include <mutex>
#include <vector>

#include "operator/geometry.h"
#include "ort/kernel.h"

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
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64:
      return FLASHONNX_INT64;
    default:
      return FLASHONNX_NONE;
  }
}

namespace {

struct Tensor {
  Shape shape;
  void* data = nullptr;
  int32_t dtype = FLASHONNX_NONE;
};

// One run of a node.
class Run {
 public:
  Run(const Kernel& kernel, OrtKernelContext* context)
      : kernel_(kernel), api_(kernel.api), context_(context) {}

  OrtStatus* operator()() {
    FLASHONNX_ORT_RETURN_IF_ERROR(read_inputs());
    flashonnx_attention_init(&params_);
    PackedOffsets packed;
    OutputShapes shapes;
    const InputShapes inputs = {in_[kQ].shape,       in_[kK].shape,       in_[kV].shape,
                                in_[kMask].shape,    in_[kPastKey].shape, in_[kPastValue].shape,
                                in_[kLengths].shape, in_[kSinks].shape};
    FLASHONNX_ORT_RETURN_IF_ERROR(to_ort(
        api_, describe(kernel_.attributes, inputs, Sizes::kExact, &params_, &packed, &shapes)));
    FLASHONNX_ORT_RETURN_IF_ERROR(set_device());
    FLASHONNX_ORT_RETURN_IF_ERROR(set_mask_dtype());
    bind_inputs(packed);
    FLASHONNX_ORT_RETURN_IF_ERROR(bind_outputs(shapes));
    return execute();
  }

 private:
  OrtStatus* read_inputs() {
    size_t count = 0;
    FLASHONNX_ORT_RETURN_IF_ERROR(api_.KernelContext_GetInputCount(context_, &count));
    for (size_t i = 0; i < kInputs && i < count; ++i) {
      const OrtValue* value = nullptr;
      FLASHONNX_ORT_RETURN_IF_ERROR(api_.KernelContext_GetInput(context_, i, &value));
      if (value != nullptr) FLASHONNX_ORT_RETURN_IF_ERROR(read_input(*value, &in_[i]));
    }
    return nullptr;
  }

  OrtStatus* read_input(const OrtValue& value, Tensor* tensor) {
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
  OrtStatus* set_device() {
    const OrtValue* q = nullptr;
    FLASHONNX_ORT_RETURN_IF_ERROR(api_.KernelContext_GetInput(context_, kQ, &q));
    FLASHONNX_ORT_RETURN_IF_ERROR(api_.GetTensorMemoryInfo(q, &memory_));
    int ordinal = 0;
    if (kernel_.kind == FLASHONNX_CUDA) {
      FLASHONNX_ORT_RETURN_IF_ERROR(api_.MemoryInfoGetId(memory_, &ordinal));
      FLASHONNX_ORT_RETURN_IF_ERROR(api_.KernelContext_GetGPUComputeStream(context_, &stream_));
    }
    return to_ort(api_, query_device(kernel_.kind, ordinal, &params_.device));
  }

  // Queried once a device: the attributes of a device never change.
  static flashonnx_status query_device(int32_t kind, int32_t ordinal, flashonnx_device* device) {
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

  OrtStatus* set_mask_dtype() {
    const Tensor& mask = in_[kMask];
    if (!mask.shape.present || mask.dtype == FLASHONNX_BOOL || mask.dtype == FLASHONNX_FLOAT32 ||
        mask.dtype == kernel_.dtype) {
      return nullptr;
    }
    return api_.CreateStatus(ORT_INVALID_ARGUMENT,
                             "FlashAttention: input 'attn_mask' is expected to be bool, float32 or "
                             "of Q's type, got another type");
  }

  void bind(Input input, flashonnx_tensor* tensor, int64_t offset = 0) {
    const int64_t element_size = in_[input].dtype == FLASHONNX_FLOAT32 ? 4 : 2;
    tensor->dtype = in_[input].dtype;
    if (in_[input].data == nullptr) return;
    tensor->data = static_cast<char*>(in_[input].data) + offset * element_size;
  }

  void bind_inputs(const PackedOffsets& packed) {
    const bool separate = kernel_.attributes.layout == Layout::kSeparate;
    bind(kQ, &params_.q);
    bind(separate ? kK : kQ, &params_.k, packed.k);
    bind(separate ? kV : kQ, &params_.v, packed.v);
    bind(kMask, &params_.mask);
    bind(kPastKey, &params_.past_k);
    bind(kPastValue, &params_.past_v);
    bind(kLengths, &params_.key_lengths);
    bind(kSinks, &params_.sinks);
  }

  OrtStatus* bind_output(Output output, const Shape& shape, int32_t dtype, size_t count,
                         flashonnx_tensor* tensor) {
    OrtValue* value = nullptr;
    if (output >= count) return nullptr;
    FLASHONNX_ORT_RETURN_IF_ERROR(
        api_.KernelContext_GetOutput(context_, output, shape.dims.data(), shape.rank, &value));
    if (value == nullptr) return nullptr;  // not asked for
    tensor->dtype = dtype;
    return api_.GetTensorMutableData(value, &tensor->data);
  }

  OrtStatus* bind_outputs(const OutputShapes& shapes) {
    size_t count = 0;
    FLASHONNX_ORT_RETURN_IF_ERROR(api_.KernelContext_GetOutputCount(context_, &count));
    const int32_t dtype = kernel_.dtype;
    FLASHONNX_ORT_RETURN_IF_ERROR(bind_output(kY, shapes.y, dtype, count, &params_.o));
    FLASHONNX_ORT_RETURN_IF_ERROR(
        bind_output(kPresentKey, shapes.present_key, dtype, count, &params_.present_k));
    FLASHONNX_ORT_RETURN_IF_ERROR(
        bind_output(kPresentValue, shapes.present_value, dtype, count, &params_.present_v));
    return bind_output(kLse, shapes.lse, FLASHONNX_FLOAT32, count, &params_.lse);
  }

  OrtStatus* execute() {
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
  static void parallel_for(void* context, int64_t count, void (*body)(void*, int64_t), void* data) {
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

  const Kernel& kernel_;
  const OrtApi& api_;
  OrtKernelContext* context_;
  const OrtMemoryInfo* memory_ = nullptr;
  void* stream_ = nullptr;
  Tensor in_[kInputs];
  flashonnx_attention_params params_;
};

}  // namespace

OrtStatus* run(const Kernel& kernel, OrtKernelContext* context) { return Run(kernel, context)(); }

}  // namespace flashonnx::ort

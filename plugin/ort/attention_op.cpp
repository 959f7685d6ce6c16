#include "ort/attention_op.h"

#include <climits>

#include "ort/infer.h"
#include "ort/kernel.h"

namespace flashonnx::ort {
namespace {

const AttentionOp& self(const OrtCustomOp* op) { return *static_cast<const AttentionOp*>(op); }

ONNXTensorElementDataType input_type(const OrtCustomOp* op, size_t index) {
  // bool, float32 or the element type: overloads for each of them would refuse a float32 mask with
  // float16 queries. The run checks it.
  if (index == kMask) return ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  if (index == kLengths) return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
  if (index == kSinks) return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  return self(op).element;
}

ONNXTensorElementDataType output_type(const OrtCustomOp* op, size_t index) {
  return index == kLse ? ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT : self(op).element;
}

OrtStatus* create_kernel(const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info,
                         void** kernel) {
  return guarded(*api, [&]() -> OrtStatus* {
    Attributes attributes;
    FLASHONNX_ORT_RETURN_IF_ERROR(read_attributes(*api, *info, &attributes));
    const int32_t kind = self(op).provider == nullptr ? FLASHONNX_CPU : FLASHONNX_CUDA;
    *kernel = new Kernel{*api, kind, dtype_of(self(op).element), attributes};
    return nullptr;
  });
}

OrtStatus* compute(void* op_kernel, OrtKernelContext* context) {
  const Kernel& kernel = *static_cast<const Kernel*>(op_kernel);
  return guarded(kernel.api, [&] { return run(kernel, context); });
}

// Whichever overload matched, `op` is the first one: all is asked of the context.
OrtStatus* infer(const OrtCustomOp* op, OrtShapeInferContext* context) {
  const OrtApi& api = *self(op).api;
  return guarded(api, [&]() -> OrtStatus* {
    infer_output_shapes(api, context);
    return nullptr;
  });
}

AttentionOp make_op(const OrtApi& api, ONNXTensorElementDataType element, const char* provider) {
  AttentionOp op{};
  op.version = kApiVersion;
  op.api = &api;
  op.element = element;
  op.provider = provider;
  op.GetName = [](const OrtCustomOp*) { return "FlashAttention"; };
  op.GetExecutionProviderType = [](const OrtCustomOp* op) { return self(op).provider; };
  op.GetInputTypeCount = [](const OrtCustomOp*) -> size_t { return kInputs; };
  op.GetInputType = input_type;
  op.GetInputCharacteristic = [](const OrtCustomOp*, size_t index) {
    return index == kQ ? INPUT_OUTPUT_REQUIRED : INPUT_OUTPUT_OPTIONAL;
  };
  op.GetInputMemoryType = [](const OrtCustomOp*, size_t) { return OrtMemTypeDefault; };
  op.GetOutputTypeCount = [](const OrtCustomOp*) -> size_t { return kOutputs; };
  op.GetOutputType = output_type;
  op.GetOutputCharacteristic = [](const OrtCustomOp*, size_t index) {
    return index == kY ? INPUT_OUTPUT_REQUIRED : INPUT_OUTPUT_OPTIONAL;
  };
  op.GetVariadicInputMinArity = [](const OrtCustomOp*) { return 0; };
  op.GetVariadicInputHomogeneity = [](const OrtCustomOp*) { return 0; };
  op.GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 0; };
  op.GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 0; };
  op.CreateKernelV2 = create_kernel;
  op.KernelComputeV2 = compute;
  op.KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  op.InferOutputShapeFn = infer;
  op.GetStartVersion = [](const OrtCustomOp*) { return 1; };
  op.GetEndVersion = [](const OrtCustomOp*) { return INT_MAX; };
  return op;
}

}  // namespace

std::vector<AttentionOp> attention_ops(const OrtApi& api) {
  std::vector<AttentionOp> ops;
  for (const auto element :
       {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16,
        ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16}) {
    ops.push_back(make_op(api, element, nullptr));
#ifdef FLASHONNX_WITH_CUDA
    ops.push_back(make_op(api, element, "CUDAExecutionProvider"));
#endif
  }
  return ops;
}

}  // namespace flashonnx::ort

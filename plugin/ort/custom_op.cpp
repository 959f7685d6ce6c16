#include "ort/custom_op.h"

#include <climits>

#include "ort/kernel.h"

namespace flashonnx::ort {
namespace {

const CustomOp& self(const OrtCustomOp* op) { return *static_cast<const CustomOp*>(op); }

ONNXTensorElementDataType type_of(const CustomOp& op, const Port& port) {
  switch (port.type) {
    case Port::kElement:
      return op.element;
    case Port::kFloat:
      return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
    case Port::kInt32:
      return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32;
    case Port::kInt64:
      return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
    default:
      return ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  }
}

OrtCustomOpInputOutputCharacteristic characteristic(const Port& port) {
  return port.required ? INPUT_OUTPUT_REQUIRED : INPUT_OUTPUT_OPTIONAL;
}

OrtStatus* create_kernel(const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info,
                         void** kernel) {
  return guarded(*api, [&]() -> OrtStatus* {
    const Operator& definition = *self(op).definition;
    Attributes attributes;
    FLASHONNX_ORT_RETURN_IF_ERROR(read_attributes(*api, *info, definition.is_causal, &attributes));
    const int32_t kind = self(op).provider == nullptr ? FLASHONNX_CPU : FLASHONNX_CUDA;
    *kernel = new Kernel{*api, definition, kind, dtype_of(self(op).element), attributes};
    return nullptr;
  });
}

OrtStatus* compute(void* op_kernel, OrtKernelContext* context) {
  const Kernel& kernel = *static_cast<const Kernel*>(op_kernel);
  return guarded(kernel.api, [&] { return kernel.op.run(kernel, context); });
}

// Whichever overload matched, `op` is the operator's first one: all is asked of the context.
OrtStatus* infer(const OrtCustomOp* op, OrtShapeInferContext* context) {
  const OrtApi& api = *self(op).api;
  return guarded(api, [&]() -> OrtStatus* {
    self(op).definition->infer(api, context);
    return nullptr;
  });
}

CustomOp make_op(const OrtApi& api, const Operator& definition, ONNXTensorElementDataType element,
                 const char* provider) {
  CustomOp op{};
  op.version = kApiVersion;
  op.api = &api;
  op.definition = &definition;
  op.element = element;
  op.provider = provider;
  op.GetName = [](const OrtCustomOp* op) { return self(op).definition->name; };
  op.GetExecutionProviderType = [](const OrtCustomOp* op) { return self(op).provider; };
  op.GetInputTypeCount = [](const OrtCustomOp* op) { return self(op).definition->input_count; };
  op.GetInputType = [](const OrtCustomOp* op, size_t i) {
    return type_of(self(op), self(op).definition->inputs[i]);
  };
  op.GetInputCharacteristic = [](const OrtCustomOp* op, size_t i) {
    return characteristic(self(op).definition->inputs[i]);
  };
  op.GetInputMemoryType = [](const OrtCustomOp*, size_t) { return OrtMemTypeDefault; };
  op.GetOutputTypeCount = [](const OrtCustomOp* op) { return self(op).definition->output_count; };
  op.GetOutputType = [](const OrtCustomOp* op, size_t i) {
    return type_of(self(op), self(op).definition->outputs[i]);
  };
  op.GetOutputCharacteristic = [](const OrtCustomOp* op, size_t i) {
    return characteristic(self(op).definition->outputs[i]);
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
  op.GetMayInplace = definition.in_place;
  if (definition.in_place != nullptr) {
    op.ReleaseMayInplace = [](int* inputs, int* outputs) {
      delete[] inputs;
      delete[] outputs;
    };
  }
  return op;
}

}  // namespace

std::vector<CustomOp> custom_ops(const OrtApi& api) {
  std::vector<CustomOp> ops;
  for (const Operator* definition : {&kAttention, &kCache, &kVarlen}) {
    for (const auto element :
         {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16,
          ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16}) {
      ops.push_back(make_op(api, *definition, element, nullptr));
#ifdef FLASHONNX_WITH_CUDA
      ops.push_back(make_op(api, *definition, element, "CUDAExecutionProvider"));
#endif
    }
  }
  return ops;
}

}  // namespace flashonnx::ort

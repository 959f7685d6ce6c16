// Symbolic dimensions, as TensorRT's builder has them while it knows ranks alone.
#pragma once

#include <NvInferRuntime.h>

#include <functional>
#include <memory>
#include <vector>

using Sizes = std::vector<nvinfer1::Dims>;  // of the inputs

class ExpressionBuilder final : public nvinfer1::IExprBuilder {
 public:
  ExpressionBuilder();
  ~ExpressionBuilder() override;

  // The size of dimension `axis` of input `input`, whatever it will be.
  const nvinfer1::IDimensionExpr* symbol(size_t input, int32_t axis);
  // What an expression of this builder comes to.
  static int64_t evaluate(const nvinfer1::IDimensionExpr* expression, const Sizes& sizes);

 private:
  class Implementation;
  std::unique_ptr<Implementation> implementation_;
};

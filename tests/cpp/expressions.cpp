#include "expressions.h"

#include <algorithm>
#include <optional>

#include "check.h"

namespace {

using nvinfer1::DimensionOperation;
using nvinfer1::IDimensionExpr;

class Expression final : public IDimensionExpr {
 public:
  using Value = std::function<int64_t(const Sizes&)>;

  Expression(Value given, std::optional<int64_t> constant)
      : value(std::move(given)), implementation_(constant) {
    mImpl = &implementation_;
  }
  ~Expression() override = default;

  const Value value;

 private:
  class Implementation final : public nvinfer1::apiv::VDimensionExpr {
   public:
    explicit Implementation(std::optional<int64_t> constant) : constant_(constant) {}
    bool isConstant() const override { return constant_.has_value(); }
    int64_t getConstantValue() const override { return constant_.value(); }
    bool isSizeTensor() const override { return false; }

   private:
    std::optional<int64_t> constant_;
  } implementation_;
};

const Expression& ours(const IDimensionExpr* expression) {
  check(expression != nullptr, "an output dimension was not set");
  return *static_cast<const Expression*>(expression);
}

int64_t apply(DimensionOperation operation, int64_t a, int64_t b) {
  switch (operation) {
    case DimensionOperation::kSUM:
      return a + b;
    case DimensionOperation::kPROD:
      return a * b;
    case DimensionOperation::kMAX:
      return std::max(a, b);
    case DimensionOperation::kMIN:
      return std::min(a, b);
    case DimensionOperation::kSUB:
      return a - b;
    case DimensionOperation::kFLOOR_DIV:
      return a / b;
    case DimensionOperation::kCEIL_DIV:
      return (a + b - 1) / b;
    default:
      throw std::runtime_error("an operation on dimensions that the host does not know");
  }
}

}  // namespace

class ExpressionBuilder::Implementation final : public nvinfer1::apiv::VExprBuilder {
 public:
  const IDimensionExpr* add(Expression::Value value, std::optional<int64_t> constant = {}) {
    return expressions_.emplace_back(std::make_unique<Expression>(std::move(value), constant))
        .get();
  }
  const IDimensionExpr* constant(int64_t value) override {
    return add([value](const Sizes&) { return value; }, value);
  }
  const IDimensionExpr* operation(DimensionOperation operation, const IDimensionExpr& first,
                                  const IDimensionExpr& second) override {
    return add([operation, a = ours(&first).value, b = ours(&second).value](const Sizes& sizes) {
      return apply(operation, a(sizes), b(sizes));
    });
  }
  const IDimensionExpr* declareSizeTensor(int32_t, const IDimensionExpr&,
                                          const IDimensionExpr&) override {
    return nullptr;
  }

 private:
  std::vector<std::unique_ptr<Expression>> expressions_;
};

ExpressionBuilder::ExpressionBuilder() : implementation_(std::make_unique<Implementation>()) {
  mImpl = implementation_.get();
}
ExpressionBuilder::~ExpressionBuilder() = default;

const IDimensionExpr* ExpressionBuilder::symbol(size_t input, int32_t axis) {
  return implementation_->add([=](const Sizes& sizes) { return sizes.at(input).d[axis]; });
}

int64_t ExpressionBuilder::evaluate(const IDimensionExpr* expression, const Sizes& sizes) {
  return ours(expression).value(sizes);
}

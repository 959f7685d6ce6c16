#include "ort/infer.h"

#include <atomic>
#include <string>
#include <vector>

#include "ort/attributes.h"

namespace flashonnx::ort {
namespace {

// A size, a name for one, or neither (value -1 without a name).
struct Dim {
  int64_t value = -1;
  std::string name;

  bool known() const { return value >= 0; }
  bool named() const { return known() || !name.empty(); }
  std::string text() const { return known() ? std::to_string(value) : name; }
};

using Dims = std::vector<Dim>;

Dim size(int64_t value) { return value > 0 ? Dim{value, {}} : Dim{}; }

// Equal names have to mean equal sizes: the runtime plans memory by them. So a size that is
// computed is named by its formula.
Dim combine(const Dim& a, const char* operation, const Dim& b) {
  if (!a.named() || !b.named()) return {};
  std::string formula = "(";
  formula.append(a.text()).append(operation).append(b.text()).append(")");
  return {-1, formula};
}

Dim sum(const Dim& a, const Dim& b) {
  if (a.known() && b.known()) return {a.value + b.value, {}};
  if (a.known() && a.value == 0) return b;
  if (b.known() && b.value == 0) return a;
  return combine(a, " + ", b);
}

Dim product(const Dim& a, const Dim& b) {
  if (a.known() && b.known()) return {a.value * b.value, {}};
  return combine(a, "*", b);
}

Dim quotient(const Dim& a, const Dim& b) {
  if (a.known() && b.known()) return b.value > 0 ? Dim{a.value / b.value, {}} : Dim{};
  return combine(a, "/", b);
}

Dim better(const Dim& a, const Dim& b) { return a.known() || !b.named() ? a : b; }

class Context {
 public:
  Context(const OrtApi& api, OrtShapeInferContext* context) : api_(api), context_(context) {}

  // The shape of an input; empty if it is absent or nothing is known of it.
  Dims input(size_t index) const {
    size_t count = 0;
    if (!succeeded(api_, api_.ShapeInferContext_GetInputCount(context_, &count))) return {};
    OrtTensorTypeAndShapeInfo* info = nullptr;  // the context's own
    if (index >= count ||
        !succeeded(api_, api_.ShapeInferContext_GetInputTypeShape(context_, index, &info))) {
      return {};
    }
    size_t rank = 0;
    if (!succeeded(api_, api_.GetDimensionsCount(info, &rank)) || rank == 0) return {};
    std::vector<int64_t> values(rank);
    std::vector<const char*> names(rank);
    if (!succeeded(api_, api_.GetDimensions(info, values.data(), rank)) ||
        !succeeded(api_, api_.GetSymbolicDimensions(info, names.data(), rank))) {
      return {};
    }
    Dims dims(rank);
    for (size_t i = 0; i < rank; ++i) dims[i] = {values[i], names[i] ? names[i] : ""};
    return dims;
  }

  ONNXTensorElementDataType input_type(size_t index) const {
    ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
    OrtTensorTypeAndShapeInfo* info = nullptr;
    size_t count = 0;
    if (succeeded(api_, api_.ShapeInferContext_GetInputCount(context_, &count)) && index < count &&
        succeeded(api_, api_.ShapeInferContext_GetInputTypeShape(context_, index, &info))) {
      (void)succeeded(api_, api_.GetTensorElementType(info, &type));
    }
    return type;
  }

  void output(size_t index, ONNXTensorElementDataType type, const Dims& dims) const {
    std::vector<int64_t> values;
    std::vector<std::string> names;
    for (const Dim& dim : dims) {
      values.push_back(dim.known() ? dim.value : -1);
      names.push_back(dim.known() ? "" : dim.named() ? dim.name : unknown());
    }
    std::vector<const char*> pointers;
    for (const std::string& name : names) pointers.push_back(name.c_str());
    OrtTensorTypeAndShapeInfo* info = nullptr;
    if (!succeeded(api_, api_.CreateTensorTypeAndShapeInfo(&info))) return;
    const Handle<OrtTensorTypeAndShapeInfo> handle(info, api_.ReleaseTensorTypeAndShapeInfo);
    // Setting an output that the node lacks is refused, and harmless, from ONNX Runtime 1.28 on.
    (void)(succeeded(api_, api_.SetTensorElementType(info, type)) &&
           succeeded(api_, api_.SetDimensions(info, values.data(), values.size())) &&
           succeeded(api_, api_.SetSymbolicDimensions(info, pointers.data(), pointers.size())) &&
           succeeded(api_, api_.ShapeInferContext_SetOutputTypeShape(context_, index, info)));
  }

 private:
  // A dimension without a name would be taken for one of size -1.
  static std::string unknown() {
    static std::atomic<uint64_t> count{0};
    return "flashonnx_unknown_" + std::to_string(count++);
  }

  const OrtApi& api_;
  OrtShapeInferContext* context_;
};

struct Sizes {
  Dim batch, q_heads, kv_heads, q_length, kv_length, head_dim, value_dim;
};

bool separate_sizes(const Attributes& a, const Dims& q, const Dims& k, const Dims& v, Sizes* s) {
  s->q_heads = size(a.q_num_heads);
  s->kv_heads = size(a.kv_num_heads);
  const size_t length = q.size() == 4 ? 2 : 1;
  if (q.size() == 4) {
    s->q_heads = better(q[1], s->q_heads);
    s->head_dim = q[3];
  } else if (q.size() == 3) {
    s->head_dim = quotient(q[2], s->q_heads);
  } else {
    return false;
  }
  s->batch = q[0];
  s->q_length = q[length];
  if (k.size() == q.size()) {
    s->batch = better(s->batch, k[0]);
    s->kv_length = k[length];
    if (k.size() == 4) s->kv_heads = better(k[1], s->kv_heads);
  }
  if (v.size() == q.size()) {
    s->batch = better(s->batch, v[0]);
    s->kv_length = better(s->kv_length, v[length]);
    if (v.size() == 4) s->kv_heads = better(s->kv_heads, v[1]);
    s->value_dim = v.size() == 4 ? v[3] : quotient(v[2], s->kv_heads);
  }
  return true;
}

bool packed_sizes(const Attributes& a, const Dims& q, Sizes* s) {
  if (q.size() != 3 && q.size() != 5) return false;
  const bool time_major = a.layout == Layout::kTimeMajor;
  s->batch = q[time_major ? 1 : 0];
  s->q_length = s->kv_length = q[time_major ? 0 : 1];
  s->q_heads = size(a.q_num_heads);
  if (q.size() == 5) {
    s->q_heads = q[a.layout == Layout::k3hd ? 3 : 2];
    s->head_dim = q[4];
  }
  s->kv_heads = a.layout == Layout::kGqa ? size(a.kv_num_heads) : s->q_heads;
  if (q.size() == 3) {
    const Dim parts = sum(s->q_heads, product(Dim{2, {}}, s->kv_heads));
    s->head_dim = quotient(q[2], parts);
  }
  s->value_dim = s->head_dim;
  return true;
}

// Y and lse of an operator whose tokens are (B, S, H*D) or (B, H, S, D), or packed (T, H*D) or (T,
// H, D). `lse`: the output's index.
void infer_rows(const Context& context, const Dims& q, bool ragged, const Dim& heads,
                const Dim& value_dim, size_t lse) {
  const auto type = context.input_type(0);
  const size_t flat = ragged ? 2 : 3;
  if (q.size() != flat && q.size() != flat + 1) return;
  const bool ranked = q.size() == flat + 1;
  const Dim q_heads = ranked ? q[1] : heads;
  Dims y = q, rows = {q[0], q_heads, q[ranked ? 2 : 1]};
  y.back() = ranked ? value_dim : product(q_heads, value_dim);
  if (ragged) rows = {q_heads, q[0]};
  context.output(0, type, y);
  context.output(lse, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, rows);
}

}  // namespace

void infer_cache(const OrtApi& api, OrtShapeInferContext* ort_context) {
  const Context context(api, ort_context);
  const Attributes attributes = peek_attributes(api, *ort_context);
  const Dims keys = context.input(3), values = context.input(4);
  if (keys.size() == 4) context.output(1, context.input_type(0), keys);
  if (values.size() == 4) context.output(2, context.input_type(0), values);
  const bool ragged = context.input_type(7) != ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  infer_rows(context, context.input(0), ragged, size(attributes.q_num_heads),
             values.size() == 4 ? values[3] : Dim{}, 3);
}

void infer_varlen(const OrtApi& api, OrtShapeInferContext* ort_context) {
  const Context context(api, ort_context);
  const Attributes attributes = peek_attributes(api, *ort_context);
  const Dims v = context.input(2);
  Dim value_dim;
  if (v.size() == 3) value_dim = v[2];
  if (v.size() == 2) value_dim = quotient(v[1], size(attributes.kv_num_heads));
  infer_rows(context, context.input(0), true, size(attributes.q_num_heads), value_dim, 1);
}

void infer_attention(const OrtApi& api, OrtShapeInferContext* ort_context) {
  const Context context(api, ort_context);
  const Attributes attributes = peek_attributes(api, *ort_context);
  const Dims q = context.input(0);
  const bool separate = attributes.layout == Layout::kSeparate;
  Sizes s;
  if (!(separate ? separate_sizes(attributes, q, context.input(1), context.input(2), &s)
                 : packed_sizes(attributes, q, &s))) {
    return;
  }
  const ONNXTensorElementDataType type = context.input_type(0);
  const Dim hidden = product(s.q_heads, s.value_dim);
  if (separate && q.size() == 4) {
    context.output(0, type, {s.batch, s.q_heads, s.q_length, s.value_dim});
  } else if (attributes.layout == Layout::kTimeMajor) {
    context.output(0, type, {s.q_length, s.batch, hidden});
  } else {
    context.output(0, type, {s.batch, s.q_length, hidden});
  }
  const Dims past = context.input(4);
  const Dim keys = past.size() == 4 ? sum(past[2], s.kv_length) : s.kv_length;
  context.output(1, type, {s.batch, s.kv_heads, keys, s.head_dim});
  context.output(2, type, {s.batch, s.kv_heads, keys, s.value_dim});
  context.output(3, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, {s.batch, s.q_heads, s.q_length});
}

}  // namespace flashonnx::ort

#include "trt/shapes.h"

#include <initializer_list>

#include "kernels/common/status.h"

namespace flashonnx::trt {
namespace {

using nvinfer1::DimensionOperation;
using nvinfer1::DimsExprs;
using Expression = const nvinfer1::IDimensionExpr*;

class Algebra {
 public:
  explicit Algebra(nvinfer1::IExprBuilder& builder) : builder_(builder) {}
  Expression constant(int64_t value) const { return builder_.constant(value); }
  Expression sum(Expression a, Expression b) const {
    return builder_.operation(DimensionOperation::kSUM, *a, *b);
  }
  Expression product(Expression a, Expression b) const {
    return builder_.operation(DimensionOperation::kPROD, *a, *b);
  }
  Expression quotient(Expression a, int64_t b) const {
    return builder_.operation(DimensionOperation::kFLOOR_DIV, *a, *constant(b));
  }

 private:
  nvinfer1::IExprBuilder& builder_;
};

struct Dimensions {
  Expression batch, q_heads, kv_heads, q_length, kv_length, head_dim, value_dim;
};

flashonnx_status wrong_rank(const char* input, const char* expected, int32_t got) {
  return make_status(FLASHONNX_INVALID_ARGUMENT,
                     "FlashAttention: input '%s' is expected to have %s dimensions, got %d", input,
                     expected, got);
}

flashonnx_status need_heads() {
  return make_status(FLASHONNX_INVALID_ARGUMENT,
                     "FlashAttention: attributes 'q_num_heads' and 'kv_num_heads' are expected "
                     "with inputs of 3 dimensions");
}

flashonnx_status separate(const Attributes& a, const DimsExprs& q, const DimsExprs& k,
                          const DimsExprs& v, const Algebra& algebra, Dimensions* dims) {
  if (q.nbDims != 3 && q.nbDims != 4) return wrong_rank("Q", "3 or 4", q.nbDims);
  const char* rank = q.nbDims == 3 ? "3" : "4";
  if (k.nbDims != q.nbDims) return wrong_rank("K", rank, k.nbDims);
  if (v.nbDims != q.nbDims) return wrong_rank("V", rank, v.nbDims);
  if (q.nbDims == 4) {
    *dims = {q.d[0], q.d[1], k.d[1], q.d[2], k.d[2], q.d[3], v.d[3]};
    return ok();
  }
  if (a.q_num_heads == 0 || a.kv_num_heads == 0) return need_heads();
  *dims = {q.d[0],
           algebra.constant(a.q_num_heads),
           algebra.constant(a.kv_num_heads),
           q.d[1],
           k.d[1],
           algebra.quotient(q.d[2], a.q_num_heads),
           algebra.quotient(v.d[2], a.kv_num_heads)};
  return ok();
}

flashonnx_status packed(const Node& node, const DimsExprs& q, const Algebra& algebra,
                        Dimensions* dims) {
  const bool grouped =
      node.attributes.layout == Layout::k3hd || node.attributes.layout == Layout::kH3d;
  if (grouped && q.nbDims == 5) {
    const Expression heads = q.d[node.attributes.layout == Layout::k3hd ? 3 : 2];
    *dims = {q.d[0], heads, heads, q.d[1], q.d[1], q.d[4], q.d[4]};
    return ok();
  }
  if (q.nbDims != 3) return wrong_rank("Q", grouped ? "3 or 5" : "3", q.nbDims);
  const int64_t q_heads = node.attributes.q_num_heads;
  if (q_heads == 0) return need_heads();
  const int64_t kv_heads =
      node.attributes.kv_num_heads == 0 ? q_heads : node.attributes.kv_num_heads;
  const bool time_major = node.attributes.layout == Layout::kTimeMajor;
  const Expression length = q.d[time_major ? 0 : 1];
  const Expression dim = algebra.quotient(q.d[2], q_heads + 2 * kv_heads);
  *dims = {q.d[time_major ? 1 : 0],
           algebra.constant(q_heads),
           algebra.constant(kv_heads),
           length,
           length,
           dim,
           dim};
  return ok();
}

void assign(DimsExprs* shape, std::initializer_list<Expression> dims) {
  shape->nbDims = 0;
  for (Expression dim : dims) shape->d[shape->nbDims++] = dim;
}

flashonnx_status attention_shapes(const Node& node, const DimsExprs* const* given,
                                  const Algebra& algebra, DimsExprs* outputs) {
  using namespace attention;
  const DimsExprs& q = *given[kQ];
  Dimensions dims{};
  FLASHONNX_RETURN_IF_ERROR(
      node.attributes.layout != Layout::kSeparate
          ? packed(node, q, algebra, &dims)
          : separate(node.attributes, q, *given[kK], *given[kV], algebra, &dims));
  Expression keys = dims.kv_length;
  if (const DimsExprs* past = given[kPastKey]; past != nullptr) {
    if (past->nbDims != 4) return wrong_rank("past_key", "4", past->nbDims);
    keys = algebra.sum(past->d[2], keys);
  }
  for (int32_t i = 0; i < node.output_count; ++i) {
    switch (node.outputs[i]) {
      case kPresentKey:
        assign(&outputs[i], {dims.batch, dims.kv_heads, keys, dims.head_dim});
        break;
      case kPresentValue:
        assign(&outputs[i], {dims.batch, dims.kv_heads, keys, dims.value_dim});
        break;
      case kLse:
        assign(&outputs[i], {dims.batch, dims.q_heads, dims.q_length});
        break;
      default:
        if (q.nbDims == 4) {
          assign(&outputs[i], {dims.batch, dims.q_heads, dims.q_length, dims.value_dim});
        } else {
          const bool time_major = node.attributes.layout == Layout::kTimeMajor;
          assign(&outputs[i],
                 {time_major ? dims.q_length : dims.batch, time_major ? dims.batch : dims.q_length,
                  algebra.product(dims.q_heads, dims.value_dim)});
        }
    }
  }
  return ok();
}

// Y and lse of tokens (B, S, H*D) or (B, H, S, D), or packed (T, H*D) or (T, H, D).
flashonnx_status row_shapes(const Attributes& a, const DimsExprs& q, bool ragged,
                            Expression value_dim, const Algebra& algebra, DimsExprs* y,
                            DimsExprs* lse) {
  const int32_t flat = ragged ? 2 : 3;
  const bool ranked = q.nbDims == flat + 1;
  if (q.nbDims != flat && !ranked) return wrong_rank("Q", ragged ? "2 or 3" : "3 or 4", q.nbDims);
  if (!ranked && a.q_num_heads == 0) return need_heads();
  const Expression heads = ranked ? q.d[1] : algebra.constant(a.q_num_heads);
  *y = q;
  y->d[q.nbDims - 1] = ranked ? value_dim : algebra.product(heads, value_dim);
  if (ragged) {
    assign(lse, {heads, q.d[0]});
  } else {
    assign(lse, {q.d[0], heads, q.d[ranked ? 2 : 1]});
  }
  return ok();
}

flashonnx_status cache_shapes(const Node& node, const DimsExprs* const* given,
                              const Algebra& algebra, DimsExprs* outputs) {
  using namespace cache;
  for (const int32_t input : {kKeyCache, kValueCache}) {
    if (given[input]->nbDims != 4)
      return wrong_rank(node.op->inputs[input].name, "4", given[input]->nbDims);
  }
  DimsExprs y, lse;
  FLASHONNX_RETURN_IF_ERROR(row_shapes(node.attributes, *given[kQ], node.has_input(kSequences),
                                       given[kValueCache]->d[3], algebra, &y, &lse));
  for (int32_t i = 0; i < node.output_count; ++i) {
    const int32_t output = node.outputs[i];
    outputs[i] = output == kPresentKey     ? *given[kKeyCache]
                 : output == kPresentValue ? *given[kValueCache]
                 : output == kLse          ? lse
                                           : y;
  }
  return ok();
}

flashonnx_status varlen_shapes(const Node& node, const DimsExprs* const* given,
                               const Algebra& algebra, DimsExprs* outputs) {
  using namespace varlen;
  const DimsExprs& v = *given[kV];
  if (v.nbDims != given[kQ]->nbDims)
    return wrong_rank("V", given[kQ]->nbDims == 2 ? "2" : "3", v.nbDims);
  if (v.nbDims == 2 && node.attributes.kv_num_heads == 0) return need_heads();
  const Expression value_dim =
      v.nbDims == 3 ? v.d[2] : algebra.quotient(v.d[1], node.attributes.kv_num_heads);
  DimsExprs y, lse;
  FLASHONNX_RETURN_IF_ERROR(
      row_shapes(node.attributes, *given[kQ], true, value_dim, algebra, &y, &lse));
  for (int32_t i = 0; i < node.output_count; ++i) outputs[i] = node.outputs[i] == kLse ? lse : y;
  return ok();
}

}  // namespace

flashonnx_status output_shapes(const Node& node, const DimsExprs* inputs,
                               nvinfer1::IExprBuilder& builder, DimsExprs* outputs) {
  const Algebra algebra(builder);
  const DimsExprs* given[kMaxInputs] = {};
  for (int32_t i = 0; i < node.input_count; ++i) given[node.inputs[i]] = &inputs[i];
  if (node.op == &kCache) return cache_shapes(node, given, algebra, outputs);
  if (node.op == &kVarlen) return varlen_shapes(node, given, algebra, outputs);
  return attention_shapes(node, given, algebra, outputs);
}

}  // namespace flashonnx::trt

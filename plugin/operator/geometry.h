// From a node's shapes to the seam's sizes and strides: everything but types and data.
#pragma once

#include <array>
#include <cstdint>

#include "flashonnx/attention.h"
#include "operator/attributes.h"

namespace flashonnx {

inline constexpr size_t kMaxRank = 5;

struct Shape {
  bool present = false;
  size_t rank = 0;  // dims holds the first kMaxRank sizes
  std::array<int64_t, kMaxRank> dims{};
};

// The node's inputs, in their order.
struct InputShapes {
  Shape q, k, v, mask, past_key, past_value, lengths, sinks, bias;
};

// Where the projections begin in Q's memory, in elements; 0 where K and V are inputs of their own.
// Their biases are in one input always.
struct PackedOffsets {
  int64_t k = 0;
  int64_t v = 0;
  int64_t k_bias = 0;
  int64_t v_bias = 0;
};

struct OutputShapes {
  Shape y, present_key, present_value, lse;
};

enum class Sizes {
  kExact,   // the shapes must agree with each other
  kMaxima,  // they are upper bounds, which need not agree: any one bounds a size that several share
};

// Checks the shapes against each other and fills the sizes and strides of `params`, those of the
// outputs included. An error names the input, what was expected and what came.
flashonnx_status describe(const Attributes& attributes, const InputShapes& inputs, Sizes sizes,
                          flashonnx_attention_params* params, PackedOffsets* packed,
                          OutputShapes* outputs);

}  // namespace flashonnx

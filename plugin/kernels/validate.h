// Is the problem one the operator defines? The only place that checks; adapters translate and pass
// on.
#pragma once

#include "kernels/table.h"

namespace flashonnx {

// OK, or INVALID_ARGUMENT naming the field, what was expected and what came. Never looks at data
// pointers.
flashonnx_status validate(const Params& params);

// INVALID_ARGUMENT if a tensor that is present and not empty has no data, or a present tensor
// overlaps its past in a way that no copy in place can serve. Called by `run` after validate.
flashonnx_status validate_data(const Params& params);

// "float32", ..., for messages.
const char* dtype_name(int32_t dtype);

}  // namespace flashonnx

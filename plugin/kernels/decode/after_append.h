// The launch where the kernel before it is known: the one that appends to a cache, which is small,
// so that blocks of any size find room while it ends.
#pragma once

#include "kernels/table.h"

namespace flashonnx::decode {

// `given`: the problem before it was resolved.
flashonnx_status launch_after_append(const Params& params, const Params& given, void* workspace,
                                     void* stream);

}  // namespace flashonnx::decode

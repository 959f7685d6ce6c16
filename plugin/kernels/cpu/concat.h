#pragma once

#include "kernels/table.h"

namespace flashonnx::cpu {

// present[b, h, 0:past_length] = past (unless it stands there already), present[b, h, past_length:]
// = the new rows.
void concat(const Params& params, const flashonnx_tensor& present, const flashonnx_tensor& past,
            const flashonnx_tensor& rows, int64_t dim, int64_t element_size, bool copy_past);

}  // namespace flashonnx::cpu

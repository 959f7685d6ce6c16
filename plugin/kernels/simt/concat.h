// Writing present keys and values on the device.
#pragma once

#include <cstdint>

#include "flashonnx/attention.h"

namespace flashonnx {

// present[b, h, :past_len] = past[b, h], present[b, h, past_len:] = fresh[b, h], for (batch, heads,
// length, dim) views whose features are contiguous. element_size: 1, 2 or 4 bytes. Without
// copy_past (present is past's own memory) only `fresh` is written. Enqueues on `stream` (a
// cudaStream_t of the current device).
flashonnx_status concat_cuda(const flashonnx_tensor& present, const flashonnx_tensor& past,
                             const flashonnx_tensor& fresh, int64_t batch, int64_t heads,
                             int64_t past_len, int64_t new_len, int64_t dim, int64_t element_size,
                             bool copy_past, void* stream);

}  // namespace flashonnx

// What the library offers TensorRT programs besides TensorRT's own entry points (getCreators,
// setLoggerFinder), which loadLibrary looks up. There if it was built with TensorRT's headers.
#pragma once

#include "flashonnx/attention.h"

#ifdef __cplusplus
extern "C" {
#endif

// Registers the plugin with every TensorRT (10, 11, lean, RTX) that is loaded in this process and
// does not have it yet. Instead of loadLibrary, which refuses a library whose plugin is there.
FLASHONNX_API flashonnx_status flashonnx_tensorrt_register(void);

// What the plugin last refused, and why, since the last call: TensorRT gives such reasons to the
// first logger that the process had, which need not be the one of the builder that failed.
FLASHONNX_API flashonnx_status flashonnx_tensorrt_last_error(void);

#ifdef __cplusplus
}
#endif

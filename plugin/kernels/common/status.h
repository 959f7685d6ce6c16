// Making statuses. The one error mechanism of the library: no exceptions, no exit, no print.
#pragma once

#include <cstdarg>
#include <cstdio>

#include "flashonnx/status.h"

namespace flashonnx {

inline flashonnx_status ok() { return {}; }

__attribute__((format(printf, 2, 3))) inline flashonnx_status make_status(int32_t code,
                                                                          const char* format, ...) {
  flashonnx_status status{code, {}};
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(status.message, sizeof status.message, format, arguments);
  va_end(arguments);
  return status;
}

}  // namespace flashonnx

#define FLASHONNX_RETURN_IF_ERROR(expression)                                  \
  if (flashonnx_status status_ = (expression); status_.code != FLASHONNX_OK) { \
    return status_;                                                            \
  }

// What every function of the library returns: a code and a sentence. C and C++.
#pragma once

#include <stdint.h>

#if defined(__cplusplus) && __cplusplus >= 201703L
#define FLASHONNX_NODISCARD [[nodiscard]]
#else
#define FLASHONNX_NODISCARD
#endif

enum {
  FLASHONNX_OK = 0,
  FLASHONNX_INVALID_ARGUMENT = 1,  // the problem contradicts itself or the operator's definition
  FLASHONNX_NOT_IMPLEMENTED =
      2,  // a valid problem that no kernel of this build solves on this device
  FLASHONNX_RUNTIME_ERROR = 3,  // the device or the driver refused
};

// Returned by value, so nothing has to be freed. `message` is never null-less: empty when there is
// nothing to say, on errors "input 'K' is expected to have ..., got ...", on a successful
// `supported` the name of the chosen kernel.
typedef struct FLASHONNX_NODISCARD flashonnx_status {
  int32_t code;
  char message[508];
} flashonnx_status;

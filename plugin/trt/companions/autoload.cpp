// libflashonnx_trt_autoload.so, for hosts that do no more than open a plugin library (Polygraphy's
// --plugins, trtexec's --staticPlugins, ONNX Runtime's TensorRT provider): opening it registers the
// creators with every TensorRT of the process. libflashonnx.so itself must not do that, as
// TensorRT's loadLibrary fails or crashes on a library that has registered its creators already.
#include <dlfcn.h>

#include <cstdio>

#include "flashonnx/tensorrt.h"

namespace {

// These hosts look at nothing but dlopen's result, so standard error is the only place for a
// reason.
__attribute__((constructor)) void register_with_tensorrt() {
  const flashonnx_status status = flashonnx_tensorrt_register();
  if (status.code != FLASHONNX_OK) {
    std::fprintf(stderr, "libflashonnx_trt_autoload.so: %s\n", status.message);
  }
  // TensorRT-RTX's parser will open it by this name: the one in rtx/, if there is no other.
  if (dlopen("libtensorrt_rtx.so.1", RTLD_LAZY | RTLD_NOLOAD) != nullptr) {
    dlopen("libtensorrt_rtx.so", RTLD_LAZY);
  }
}

}  // namespace

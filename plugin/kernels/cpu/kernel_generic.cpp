// What the target always has: SSE2 on x86-64, Advanced SIMD on AArch64.
#define FLASHONNX_CPU_ISA generic
#include "kernel.h"

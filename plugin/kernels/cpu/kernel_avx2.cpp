// AVX2 with FMA and F16C: Haswell, Zen and later.
#define FLASHONNX_CPU_ISA avx2
#include "kernel.h"

// AVX-512 F, BW, DQ and VL: Skylake servers, Zen 4 and later.
#define FLASHONNX_CPU_ISA avx512
#include "kernel.h"

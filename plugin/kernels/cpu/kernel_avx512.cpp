#define FLASHONNX_CPU_ISA avx512
#include "kernel.h"

#define FLASHONNX_CPU_ISA avx2
#include "kernel.h"

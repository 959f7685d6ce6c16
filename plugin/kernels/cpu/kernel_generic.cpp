#define FLASHONNX_CPU_ISA generic
#include "kernel.h"

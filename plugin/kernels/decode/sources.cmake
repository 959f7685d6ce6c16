# The kernel for few queries and many keys, compute capability 8.0 and up. Paths are relative to plugin/.
set(FLASHONNX_DECODE_SOURCES
  kernels/decode/launch.cu
  kernels/decode/combine.cu
  kernels/decode/dim64.cu
  kernels/decode/dim64_wide.cu
  kernels/decode/dim128.cu
  kernels/decode/dim128_wide.cu
  kernels/decode/dim256.cu)

# float32 on tensor cores. Paths are relative to plugin/.
# One file per bucket of head dimensions, so that they compile side by side.
set(FLASHONNX_TF32_SOURCES
  kernels/tf32/launch.cu
  kernels/tf32/dim64.cu
  kernels/tf32/dim128.cu)

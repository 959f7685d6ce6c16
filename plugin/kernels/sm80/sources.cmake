# The tensor-core kernel for compute capability 8.0 and up. Paths are relative to plugin/.
# One file per bucket of head dimensions, so that they compile side by side.
set(FLASHONNX_SM80_SOURCES
  kernels/common/problem.cpp
  kernels/common/plan.cpp
  kernels/sm80/launch.cu
  kernels/sm80/dim32.cu
  kernels/sm80/dim64.cu
  kernels/sm80/dim96.cu
  kernels/sm80/dim128.cu
  kernels/sm80/dim192.cu
  kernels/sm80/dim256.cu)

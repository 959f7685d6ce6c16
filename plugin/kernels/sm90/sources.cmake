# The kernel for Hopper (compute capability 9.0). Paths are relative to plugin/.
set(FLASHONNX_SM90_SOURCES
  kernels/sm90/launch.cpp
  kernels/sm90/tensor_map.cpp
  kernels/sm90/packed_mask.cu
  kernels/sm90/packed_weights.cu
  kernels/sm90/weighted64.cu
  kernels/sm90/weighted128.cu
  kernels/sm90/dim64.cu
  kernels/sm90/few_keys.cu
  kernels/sm90/dim96.cu
  kernels/sm90/dim128.cu
  kernels/sm90/dim192.cu
  kernels/sm90/dim256.cu
  kernels/sm90/gathered64.cu
  kernels/sm90/gathered128.cu
  kernels/sm90/gathered256.cu)

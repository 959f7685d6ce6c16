# The CUDA-core kernel (any shape, no tensor cores). Paths are relative to plugin/.
# One file per element size, so that they compile side by side.
set(FLASHONNX_SIMT_SOURCES
  kernels/simt/launch.cu
  kernels/simt/float32.cu
  kernels/simt/bits16.cu
  kernels/simt/gathered_float32.cu
  kernels/simt/gathered_bits16.cu
  kernels/simt/add_bias.cu
  kernels/simt/combine.cu
  kernels/simt/concat.cu)

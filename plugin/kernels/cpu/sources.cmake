# The CPU kernel: one algorithm compiled once per instruction set, chosen at run time in launch.cpp.
# Paths are relative to plugin/; the flags below belong to the instruction-set files alone.
set(FLASHONNX_CPU_SOURCES
  kernels/cpu/add_bias.cpp
  kernels/cpu/launch.cpp
  kernels/cpu/prepare.cpp
  kernels/cpu/kernel_generic.cpp)

# Products and sums contract to FMA wherever the target has it; nothing else of fast-math is allowed:
# NaN and Inf matter.
set(flashonnx_cpu_options -O3 -ffp-contract=fast -fno-math-errno -fno-exceptions)
set_source_files_properties(kernels/cpu/kernel_generic.cpp PROPERTIES
  COMPILE_OPTIONS "${flashonnx_cpu_options}")

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  list(APPEND FLASHONNX_CPU_SOURCES kernels/cpu/kernel_avx2.cpp kernels/cpu/kernel_avx512.cpp)
  set_source_files_properties(kernels/cpu/kernel_avx2.cpp PROPERTIES
    COMPILE_OPTIONS "${flashonnx_cpu_options};-mavx2;-mfma;-mf16c")
  set_source_files_properties(kernels/cpu/kernel_avx512.cpp PROPERTIES
    COMPILE_OPTIONS "${flashonnx_cpu_options};-mavx512f;-mavx512bw;-mavx512dq;-mavx512vl;-mfma;-mf16c")
endif()

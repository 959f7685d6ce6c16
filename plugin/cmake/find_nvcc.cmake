# Looks for nvcc where users have it and enables CUDA with it. Sets FLASHONNX_WITH_CUDA to 1 or 0.
set(FLASHONNX_WITH_CUDA 0)
set(nvcc "")
if(FLASHONNX_CUDA STREQUAL "OFF")
  message(STATUS "flashonnx: FLASHONNX_CUDA=OFF: building the CPU kernel alone")
  return()
elseif(FLASHONNX_NVCC STREQUAL "wheels")
  find_package(Python3 REQUIRED COMPONENTS Interpreter)
  execute_process(COMMAND "${Python3_EXECUTABLE}" "${CMAKE_CURRENT_LIST_DIR}/nvcc_of_wheels.py"
                  OUTPUT_VARIABLE nvcc OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  cmake_path(GET nvcc PARENT_PATH toolkit)
  cmake_path(GET toolkit PARENT_PATH toolkit)
  set(CMAKE_CUDA_FLAGS "${CMAKE_CUDA_FLAGS} -L${toolkit}/lib")  # the wheels' nvcc itself looks in lib64
elseif(FLASHONNX_NVCC)
  set(nvcc "${FLASHONNX_NVCC}")
elseif(DEFINED ENV{CUDACXX})
  set(nvcc "$ENV{CUDACXX}")
else()
  find_program(FLASHONNX_NVCC_FOUND nvcc
               HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin)
  if(FLASHONNX_NVCC_FOUND)
    set(nvcc "${FLASHONNX_NVCC_FOUND}")
  endif()
endif()

if(NOT nvcc)
  if(FLASHONNX_CUDA STREQUAL "ON")
    message(FATAL_ERROR "flashonnx: FLASHONNX_CUDA=ON, but there is no nvcc in CUDACXX, CUDA_HOME or PATH")
  endif()
  message(STATUS "flashonnx: no nvcc found: building the CPU kernel alone")
  return()
endif()

# Native code for each architecture, and PTX of the lowest for every other device above it: PTX of 80 is compiled by the
# driver of an sm_100 or sm_103 just as by that of what comes after 120, which PTX of 120 would not be (devices run PTX of
# their own and lower numbers only). PTX of an 'a' architecture serves no other device, so there is none.
set(CMAKE_CUDA_ARCHITECTURES "")
set(code "")
set(lowest "")
foreach(arch IN LISTS FLASHONNX_CUDA_ARCHITECTURES)
  if(NOT arch MATCHES "^([0-9]+)[af]?$")
    message(FATAL_ERROR "flashonnx: FLASHONNX_CUDA_ARCHITECTURES is expected to be a list like 80;90a;120, got ${arch}")
  endif()
  list(APPEND CMAKE_CUDA_ARCHITECTURES "${arch}-real")
  list(APPEND code "sm_${arch}")
  if(arch STREQUAL CMAKE_MATCH_1 AND (NOT lowest OR arch LESS lowest))
    set(lowest "${arch}")
  endif()
endforeach()
# Kernels that do not depend on the architecture (no __CUDA_ARCH__, no instruction of later ones) go through that PTX to
# the code of them all. One pass of the compiler instead of one for each takes a quarter off the time, and the code is
# the same: for 90a, 12120 and 28344 instructions of 16-bit kernels either way.
set(FLASHONNX_CUDA_CODE "")
if(lowest)
  list(JOIN code "," code)
  set(FLASHONNX_CUDA_CODE "--generate-code=arch=compute_${lowest},code=[compute_${lowest},${code}]")
endif()

set(CMAKE_CUDA_COMPILER "${nvcc}")
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
set(CMAKE_CUDA_FLAGS_RELEASE "-O3 -DNDEBUG")
enable_language(CUDA)
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
set(FLASHONNX_WITH_CUDA 1)
message(STATUS "flashonnx: CUDA ${CMAKE_CUDA_COMPILER_VERSION} (${nvcc}) for ${FLASHONNX_CUDA_ARCHITECTURES}")

# Where registers do not suffice the assembler keeps values in memory and says nothing. Here it warns, and FLASHONNX_WERROR
# makes that an error, for architectures that it was tried for.
#
# Not of these kernels: 255 registers a thread, the most there are, do not suffice for them on all architectures.
set(FLASHONNX_SPILLING simt/float32.cu simt/bits16.cu simt/gathered_float32.cu simt/gathered_bits16.cu
    sm80/dim64.cu sm80/dim128.cu sm80/dim256.cu tf32/dim64.cu tf32/dim128.cu)

function(watch_registers)
  set(untried ${FLASHONNX_CUDA_ARCHITECTURES})
  list(REMOVE_ITEM untried 80 90a 120)
  list(FILTER ARGN INCLUDE REGEX "\\.cu$")
  foreach(source ${ARGN})
    string(REPLACE "kernels/" "" name "${source}")
    if(name IN_LIST FLASHONNX_SPILLING)
      continue()
    endif()
    set(options -warn-spills)
    if(name MATCHES "^(decode|sm90)/")  # others keep arrays in memory, or printf's arguments
      list(APPEND options -warn-lmem-usage)
    endif()
    if(FLASHONNX_WERROR AND NOT untried)
      list(APPEND options -Werror)
    endif()
    list(JOIN options "," options)
    set_property(SOURCE "${source}" APPEND PROPERTY COMPILE_OPTIONS "-Xptxas=${options}")
  endforeach()
endfunction()

# What every runtime's adapter shares. Paths are relative to plugin/.
set(FLASHONNX_OPERATOR_SOURCES
  operator/attributes.cpp
  operator/cache.cpp
  operator/geometry.cpp)

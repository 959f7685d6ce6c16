set(FLASHONNX_ORT_SOURCES
  ort/attention.cpp
  ort/attributes.cpp
  ort/cache.cpp
  ort/custom_op.cpp
  ort/infer.cpp
  ort/register.cpp
  ort/run.cpp)

set(FLASHONNX_ORT_SOURCES
  ort/attention_op.cpp
  ort/attributes.cpp
  ort/infer.cpp
  ort/register.cpp
  ort/run.cpp)

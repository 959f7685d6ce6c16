# The TensorRT adapter. Paths are relative to plugin/.
set(FLASHONNX_TRT_SOURCES
    trt/node.cpp
    trt/operators.cpp
    trt/fields.cpp
    trt/shapes.cpp
    trt/attention_plugin.cpp
    trt/attention_creator.cpp
    trt/runtime.cpp
    trt/entry.cpp)

// Plays the parts of TensorRT 10's libnvinfer.so.10 that a plugin library meets: the registry, the
// logger and the version. Compiled with TensorRT's own headers, so the tables of virtual functions
// are those of TensorRT 10.
#pragma once

#include <NvInferRuntime.h>

#include <string>

// What was logged as an error since the last call.
std::string take_errors();

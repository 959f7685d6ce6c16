// Functions that hosts and devices share.
#pragma once

#ifdef __CUDACC__
#define FLASHONNX_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FLASHONNX_HOST_DEVICE inline
#endif

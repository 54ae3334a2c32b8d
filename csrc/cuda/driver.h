// Asks CUDA on the host: checks its results, and finds functions of its driver, which no module links.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace deepep_moe {

// Throw std::runtime_error if `status` is an error.
inline void check_cuda(cudaError_t status, const char* what) {
    if (status == cudaSuccess) return;
    cudaGetLastError();  // otherwise a later launch would report it again
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

// Returns an attribute of a device, by default of the current one.
inline int attribute(cudaDeviceAttr which, int device = -1) {
    int value = 0;
    if (device < 0) check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    check_cuda(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
    return value;
}

// Returns the address of a function, as the driver for CUDA 12.0 has it.
inline void* driver_function(const char* name) {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
    const cudaError_t status = cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &result);
#else
    const cudaError_t status = cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &result);
#endif
    if (status != cudaSuccess || result != cudaDriverEntryPointSuccess)
        throw std::runtime_error(std::string("the CUDA driver has no ") + name + "; install a driver for CUDA 12 or newer");
    return function;
}

}  // namespace deepep_moe

// Gives the function itself, to be called.
#define DEEPEP_MOE_DRIVER(function) reinterpret_cast<decltype(&function)>(deepep_moe::driver_function(#function))

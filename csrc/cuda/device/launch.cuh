// One way to launch a kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace deepep_moe {

template <class Params>
void launch(void (*kernel)(Params), const char* name, int blocks, int threads, int64_t shared_bytes, const Params& params, void* stream) {
    // All kernels ask for the same division of first-level memory: a multiprocessor must be idle to change it.
    cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    if (status == cudaSuccess && shared_bytes > 47 * 1024)  // static shared memory counts too
        status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
    if (status == cudaSuccess) {
        kernel<<<blocks, threads, shared_bytes, static_cast<cudaStream_t>(stream)>>>(params);
        status = cudaGetLastError();
    }
    if (status != cudaSuccess) throw std::runtime_error(std::string("launch of ") + name + " failed: " + cudaGetErrorString(status));
}

// Blocks of a kernel that a multiprocessor holds at once.
template <class Params>
int blocks_per_multiprocessor(void (*kernel)(Params), int threads, int64_t shared_bytes) {
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
    int blocks = 0;
    const cudaError_t status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, shared_bytes);
    if (status != cudaSuccess) throw std::runtime_error(std::string("cudaOccupancyMaxActiveBlocksPerMultiprocessor: ") + cudaGetErrorString(status));
    return blocks;
}

}  // namespace deepep_moe

// One way to launch a kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <stdexcept>
#include <string>

namespace deepep_moe {

constexpr int kMaxDevices = 64;

// Once for a kernel and device, and where it needs more shared memory than before.
template <auto kKernel>
cudaError_t prepare(int64_t shared_bytes) {
    static std::atomic<int64_t> prepared[kMaxDevices] = {};  // bytes + 1
    int device = 0;
    cudaError_t status = cudaGetDevice(&device);
    if (status != cudaSuccess || (device < kMaxDevices && prepared[device].load(std::memory_order_relaxed) > shared_bytes)) return status;
    // All kernels ask for the same division of first-level memory: a multiprocessor must be idle to change it.
    status = cudaFuncSetAttribute(kKernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    if (status == cudaSuccess && shared_bytes > 47 * 1024)  // static shared memory counts too
        status = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
    if (status == cudaSuccess && device < kMaxDevices) prepared[device].store(shared_bytes + 1, std::memory_order_relaxed);
    return status;
}

template <auto kKernel, class Params>
void launch(const char* name, int blocks, int threads, int64_t shared_bytes, const Params& params, void* stream) {
    cudaError_t status = prepare<kKernel>(shared_bytes);
    if (status == cudaSuccess) {
        kKernel<<<blocks, threads, shared_bytes, static_cast<cudaStream_t>(stream)>>>(params);
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

// One way to launch a kernel.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <stdexcept>
#include <string>

#include "cuda/params.h"

namespace deepep_moe {

constexpr int kMaxDevices = 64;

// Once for a kernel and device: it may have all the shared memory there is.
template <auto kKernel>
cudaError_t prepare() {
    static std::atomic<bool> is_prepared[kMaxDevices] = {};
    int device = 0, most = 0;
    cudaError_t status = cudaGetDevice(&device);
    if (status != cudaSuccess || (device < kMaxDevices && is_prepared[device].load(std::memory_order_relaxed))) return status;
    // All kernels ask for the same division of first-level memory: a multiprocessor must be idle to change it.
    status = cudaFuncSetAttribute(kKernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    if (status == cudaSuccess) status = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (status == cudaSuccess)
        status = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most - kStaticSharedBytes);
    if (status == cudaSuccess && device < kMaxDevices) is_prepared[device].store(true, std::memory_order_relaxed);
    return status;
}

// Loads a kernel, which CUDA else does when it is launched first, and then waits for all that runs: a kernel that others wait for, as they
// run, is loaded ahead.
template <auto kKernel>
void load() {
    cudaFuncAttributes attributes;
    cudaError_t status = prepare<kKernel>();
    if (status == cudaSuccess) status = cudaFuncGetAttributes(&attributes, kKernel);
    if (status != cudaSuccess) throw std::runtime_error(std::string("cudaFuncGetAttributes: ") + cudaGetErrorString(status));
}

// Can this GPU start a kernel before the one before it on the stream has ended?
inline bool starts_early() {
    static std::atomic<int> generations[kMaxDevices] = {};
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess || device >= kMaxDevices) return false;
    int generation = generations[device].load(std::memory_order_relaxed);
    if (generation == 0 && cudaDeviceGetAttribute(&generation, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess)
        generations[device].store(generation, std::memory_order_relaxed);
    return generation >= 9;
}

// The same of a stream that is not being captured, for kernels whose graphs keep the order that the stream has.
inline bool can_start_early(void* stream) {
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    if (cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &capture) != cudaSuccess || capture != cudaStreamCaptureStatusNone)
        return false;
    return starts_early();
}

// early: once the kernel before it on the stream says let_next_kernel_start, or as its blocks end.
template <auto kKernel, class Params>
void launch(const char* name, int blocks, int threads, int64_t shared_bytes, const Params& params, void* stream, bool early = false) {
    cudaError_t status = prepare<kKernel>();
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    const auto queue = static_cast<cudaStream_t>(stream);
    cudaLaunchConfig_t config{dim3(blocks), dim3(threads), static_cast<size_t>(shared_bytes), queue, &attribute, early};
    if (status == cudaSuccess) status = cudaLaunchKernelEx(&config, kKernel, params);
    if (status != cudaSuccess) throw std::runtime_error(std::string("launch of ") + name + " failed: " + cudaGetErrorString(status));
}

// Blocks of a kernel that a multiprocessor holds at once.
template <auto kKernel>
int blocks_per_multiprocessor(int threads, int64_t shared_bytes) {
    int blocks = 0;
    cudaError_t status = prepare<kKernel>();
    if (status == cudaSuccess) status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kKernel, threads, shared_bytes);
    if (status != cudaSuccess)
        throw std::runtime_error(std::string("cudaOccupancyMaxActiveBlocksPerMultiprocessor: ") + cudaGetErrorString(status));
    return blocks;
}

}  // namespace deepep_moe

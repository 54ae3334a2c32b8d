// All kernels are launched by `launch`.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <stdexcept>
#include <string>

#include "cuda/params.h"

namespace deepep_moe {

constexpr int kMaxDevices = 64;

// Lets the kernel use all shared memory, once for each kernel and device.
template <auto kKernel>
cudaError_t prepare() {
    static std::atomic<bool> is_prepared[kMaxDevices] = {};
    int device = 0, most = 0;
    cudaError_t status = cudaGetDevice(&device);
    if (status != cudaSuccess || (device < kMaxDevices && is_prepared[device].load(std::memory_order_relaxed))) return status;
    // All kernels ask for the same split of L1 and shared memory, because an SM must be idle to change it.
    status = cudaFuncSetAttribute(kKernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    if (status == cudaSuccess) status = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (status == cudaSuccess)
        status = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most - kStaticSharedBytes);
    if (status == cudaSuccess && device < kMaxDevices) is_prepared[device].store(true, std::memory_order_relaxed);
    return status;
}

// Load a kernel now. Otherwise CUDA loads it at its first launch, and first waits for all running kernels. If one of these waits for the
// new kernel, that is a deadlock.
template <auto kKernel>
void load() {
    cudaFuncAttributes attributes;
    cudaError_t status = prepare<kKernel>();
    if (status == cudaSuccess) status = cudaFuncGetAttributes(&attributes, kKernel);
    if (status != cudaSuccess) throw std::runtime_error(std::string("cudaFuncGetAttributes: ") + cudaGetErrorString(status));
}

// Returns whether this GPU can start a kernel before the previous one on the stream has ended.
inline bool starts_early() {
    static std::atomic<int> generations[kMaxDevices] = {};
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess || device >= kMaxDevices) return false;
    int generation = generations[device].load(std::memory_order_relaxed);
    if (generation == 0 && cudaDeviceGetAttribute(&generation, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess)
        generations[device].store(generation, std::memory_order_relaxed);
    return generation >= 9;
}

// Returns whether a kernel may start early on this stream. While the stream is captured it may not, so graphs keep the stream's order.
inline bool can_start_early(void* stream) {
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    if (cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &capture) != cudaSuccess || capture != cudaStreamCaptureStatusNone)
        return false;
    return starts_early();
}

// Launches nothing if there are no blocks. With `early` the kernel may start once all blocks of the previous one on the stream have called
// let_next_kernel_start or ended.
template <auto kKernel, class Params>
void launch(const char* name, int blocks, int threads, int64_t shared_bytes, const Params& params, void* stream, bool early = false) {
    if (blocks == 0) return;
    cudaError_t status = prepare<kKernel>();
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    const auto queue = static_cast<cudaStream_t>(stream);
    cudaLaunchConfig_t config{dim3(blocks), dim3(threads), static_cast<size_t>(shared_bytes), queue, &attribute, early};
    if (status == cudaSuccess) status = cudaLaunchKernelEx(&config, kKernel, params);
    if (status != cudaSuccess) throw std::runtime_error(std::string("launch of ") + name + " failed: " + cudaGetErrorString(status));
}

// Returns how many blocks of a kernel one SM holds at once.
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

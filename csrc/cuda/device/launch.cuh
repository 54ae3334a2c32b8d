// All kernels are launched by `launch`.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <string>

#include "cuda/driver.h"
#include "cuda/params.h"

namespace deepep_moe {

constexpr int kMaxDevices = 64;

// Lets the kernel use all shared memory, once for each kernel and device. Throws std::runtime_error if CUDA fails, like the functions
// below.
template <auto kKernel>
void prepare() {
    static std::atomic<bool> is_prepared[kMaxDevices] = {};
    int device = 0;
    check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    if (device < kMaxDevices && is_prepared[device].load(std::memory_order_relaxed)) return;
    // All kernels ask for the same split of L1 and shared memory, because an SM must be idle to change it.
    check_cuda(cudaFuncSetAttribute(kKernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
               "cudaFuncSetAttribute");
    const int most = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device) - kStaticSharedBytes;
    check_cuda(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most), "cudaFuncSetAttribute");
    if (device < kMaxDevices) is_prepared[device].store(true, std::memory_order_relaxed);
}

// Load a kernel now. Otherwise CUDA loads it at its first launch, and first waits for all running kernels. If one of these waits for the
// new kernel, that is a deadlock.
template <auto kKernel>
void load() {
    cudaFuncAttributes attributes;
    prepare<kKernel>();
    check_cuda(cudaFuncGetAttributes(&attributes, kKernel), "cudaFuncGetAttributes");
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
    prepare<kKernel>();
    cudaLaunchAttribute serialization{};
    serialization.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    serialization.val.programmaticStreamSerializationAllowed = 1;
    const auto queue = static_cast<cudaStream_t>(stream);
    cudaLaunchConfig_t config{dim3(blocks), dim3(threads), static_cast<size_t>(shared_bytes), queue, &serialization, early};
    const cudaError_t status = cudaLaunchKernelEx(&config, kKernel, params);
    if (status != cudaSuccess) check_cuda(status, ("launch of " + std::string(name) + " failed").c_str());
}

// Returns how many blocks of a kernel one SM holds at once.
template <auto kKernel>
int blocks_per_multiprocessor(int threads, int64_t shared_bytes) {
    int blocks = 0;
    prepare<kKernel>();
    check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kKernel, threads, shared_bytes),
               "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    return blocks;
}

}  // namespace deepep_moe

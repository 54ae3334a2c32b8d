// A GPU in the memory of the process: enough of CUDA's runtime and language for csrc/cuda and csrc/runtime to run, and be tested, where
// there is no GPU. A block is a thread of the operating system, its CUDA threads are fibers of it. A stream is a thread as well; what is
// launched on the null stream has run when the launch returns. All modules of a process share one device, libemulated_gpu.so.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

// ---- language ----

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static thread_local

using std::max;
using std::min;

struct float2 {
    float x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
struct uint2 {
    unsigned x, y;
};
struct uint4 {
    unsigned x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

using cudaStream_t = struct EmulatedStream*;
using cudaEvent_t = struct EmulatedEvent*;

#pragma GCC visibility push(default)
namespace emulation {

struct Index {
    unsigned x;
};
struct Place {
    Index thread, block, block_dim, grid_dim;
};
[[gnu::const]] const Place& place();  // of a thread, the same object for all that it runs

void yield();                              // lets the block's other fibers, and other blocks, go on
void pause();                              // the same, of a thread that waits for what others do
bool sync_threads(bool vote = false);      // whether any thread's is true
const uint64_t* exchange(uint64_t value);  // [32] of all lanes of the warp, until the warp's next exchange but one
void* shared_memory(size_t& bytes);        // of the block
void launch(int blocks, int threads, size_t shared_bytes, const std::function<void()>& body);
void enqueue(cudaStream_t stream, std::function<void()> work);
void make_uninitialized(void* at, size_t bytes);  // fills its beginning

template <class T>
T shuffle(T value, int lane) {
    static_assert(sizeof(T) <= 8);
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    std::memcpy(&value, &exchange(bits)[lane & 31], sizeof(T));
    return value;
}
template <class Combine>
unsigned reduce(uint64_t value, const Combine& combine) {
    const uint64_t* const all = exchange(value);
    unsigned result = static_cast<unsigned>(all[0]);
    for (int i = 1; i < 32; ++i) result = combine(result, static_cast<unsigned>(all[i]));
    return result;
}

}  // namespace emulation
#pragma GCC visibility pop

#define threadIdx (emulation::place().thread)
#define blockIdx (emulation::place().block)
#define blockDim (emulation::place().block_dim)
#define gridDim (emulation::place().grid_dim)

inline void __syncthreads() { emulation::sync_threads(); }
inline int __syncthreads_or(int predicate) { return emulation::sync_threads(predicate != 0); }
inline void __syncwarp() { emulation::exchange(0); }
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
    return emulation::shuffle(value, lane);
}
template <class T>
T __shfl_up_sync(unsigned, T value, int step) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    return emulation::shuffle(value, lane >= step ? lane - step : lane);
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
    return emulation::shuffle(value, static_cast<int>(threadIdx.x % 32) ^ mask);
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
    return emulation::reduce(value, [](unsigned a, unsigned b) { return max(a, b); });
}
inline unsigned __reduce_min_sync(unsigned, unsigned value) {
    return emulation::reduce(value, [](unsigned a, unsigned b) { return min(a, b); });
}
inline unsigned __reduce_or_sync(unsigned, unsigned value) { return emulation::reduce(value, std::bit_or<>()); }
inline unsigned __ballot_sync(unsigned mask, int predicate) {
    return __reduce_or_sync(mask, static_cast<unsigned>(predicate != 0) << threadIdx.x % 32);
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == 0xffffffffu; }
inline unsigned __match_any_sync(unsigned, int value) {
    const uint64_t* all = emulation::exchange(static_cast<uint32_t>(value));
    unsigned bits = 0;
    for (int i = 0; i < 32; ++i) bits |= static_cast<unsigned>(all[i] == static_cast<uint32_t>(value)) << i;
    return bits;
}

inline int atomicAdd(int* to, int value) { return __atomic_fetch_add(to, value, __ATOMIC_SEQ_CST); }
inline unsigned long long atomicAdd(unsigned long long* to, unsigned long long value) {
    return __atomic_fetch_add(to, value, __ATOMIC_SEQ_CST);
}
inline unsigned atomicOr(unsigned* to, unsigned bits) { return __atomic_fetch_or(to, bits, __ATOMIC_SEQ_CST); }
inline unsigned atomicAnd(unsigned* to, unsigned bits) { return __atomic_fetch_and(to, bits, __ATOMIC_SEQ_CST); }
template <class T>
T atomicCAS(T* at, T expected, T value) {
    __atomic_compare_exchange_n(at, &expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    return expected;
}
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(unsigned bits) { return __builtin_ffs(static_cast<int>(bits)); }
template <class T>
T __ldcg(const T* from) {
    return *from;
}
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selected) {
    const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) result |= static_cast<unsigned>(bytes >> 8 * (selected >> 4 * i & 7) & 0xff) << 8 * i;
    return result;
}
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
inline double __longlong_as_double(long long bits) { return std::bit_cast<double>(bits); }
inline long long __double_as_longlong(double value) { return std::bit_cast<long long>(value); }

// ---- runtime ----

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorNotReady = 600 };
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };
enum cudaDeviceAttr {
    cudaDevAttrMultiProcessorCount,
    cudaDevAttrMaxSharedMemoryPerBlockOptin,
    cudaDevAttrComputeCapabilityMajor,
    cudaDevAttrGPUDirectRDMAWritesOrdering
};
enum cudaGPUDirectRDMAWritesOrdering { cudaGPUDirectRDMAWritesOrderingOwner = 100 };
enum cudaDeviceP2PAttr { cudaDevP2PAttrNativeAtomicSupported };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess, cudaDriverEntryPointSymbolNotFound };
constexpr unsigned cudaHostAllocMapped = 1, cudaHostAllocPortable = 2, cudaStreamNonBlocking = 1, cudaEventDisableTiming = 1,
                   cudaEnableDefault = 0;

#pragma GCC visibility push(default)
cudaError_t cudaMalloc(void** pointer, size_t bytes);
cudaError_t cudaFree(void* pointer);
cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned);
cudaError_t cudaFreeHost(void* pointer);
cudaError_t cudaGetDriverEntryPoint(const char* name, void** found, unsigned, cudaDriverEntryPointQueryResult* result);

// The bus of the device of this process: $DEEPEP_MOE_EMULATED_BUS, or 0 for all. Links to devices on another bus have no atomics, as over
// PCIe.
cudaError_t cudaDeviceGetPCIBusId(char* id, int capacity, int);
cudaError_t cudaDeviceGetByPCIBusId(int* device, const char* id);

cudaError_t cudaDeviceSynchronize();
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t stream);
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream);
#pragma GCC visibility pop

inline cudaError_t cudaDeviceGetP2PAttribute(int* value, cudaDeviceP2PAttr, int, int) { return *value = 0, cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t error) {
    return error == cudaSuccess ? "no error" : error == cudaErrorNotReady ? "not ready" : "invalid value";
}
inline cudaError_t cudaMemGetInfo(size_t* free, size_t* total) { return *free = *total = size_t{1} << 40, cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaMemset(void* at, int value, size_t bytes) { return std::memset(at, value, bytes), cudaSuccess; }
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
    return std::memcpy(to, from, bytes), cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
    switch (which) {
        case cudaDevAttrMultiProcessorCount: return *value = 12, cudaSuccess;
        case cudaDevAttrComputeCapabilityMajor: return *value = 9, cudaSuccess;
        case cudaDevAttrGPUDirectRDMAWritesOrdering: return *value = cudaGPUDirectRDMAWritesOrderingOwner, cudaSuccess;
        default: return *value = 227 * 1024, cudaSuccess;
    }
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { return *least = *greatest = 0, cudaSuccess; }
inline cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
    return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
inline cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id) {
    return *status = cudaStreamCaptureStatusNone, *id = 0, cudaSuccess;
}

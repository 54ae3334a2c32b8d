// Wraps CUDA on the host besides streams: checks, attributes, the current device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <span>
#include <utility>

namespace deepep_moe {

// Throw std::runtime_error if `status` is an error.
void check_cuda(cudaError_t status, const char* what);
int attribute(cudaDeviceAttr which, int device);
// Throw std::runtime_error for what a launcher of csrc/nvshmem has returned, unless it is nullptr.
void check_launch(const char* error);
// Throw std::invalid_argument if the shim of csrc/nvshmem is of another build, or if there is not a PE for each node.
void check_rail(bool is_same_build, size_t num_pes, int num_nodes);

// Returns a new T in host memory that kernels can write, with `more_bytes` behind it. cudaFreeHost frees it.
template <class T>
T* new_pinned(size_t more_bytes = 0) {
    void* memory = nullptr;
    check_cuda(cudaHostAlloc(&memory, sizeof(T) + more_bytes, cudaHostAllocMapped | cudaHostAllocPortable), "cudaHostAlloc");
    return new (memory) T{};
}

// A pointer to be set, and the bytes that it will point to.
using Array = std::pair<void**, int64_t>;
template <class T>
Array array_of(T** pointer, int64_t count) {
    return {reinterpret_cast<void**>(pointer), count * static_cast<int64_t>(sizeof(T))};
}
// Allocate device memory for these arrays, zeroed, each on a boundary of 128 bytes. `memory` gets the whole, for cudaFree, also if an error
// follows. `failure` begins the message of an error.
void allocate_arrays(void** memory, std::span<const Array> arrays, const char* failure);

// Sets the calling thread's device, and restores the old one at the end of the scope.
class DeviceGuard {
public:
    explicit DeviceGuard(int device);
    DeviceGuard(int device, std::nothrow_t) noexcept;  // for destructors, where the GPU may have failed
    ~DeviceGuard();
    DeviceGuard(const DeviceGuard&) = delete;

private:
    int before_ = 0;
    bool changed_ = false;
};

}  // namespace deepep_moe

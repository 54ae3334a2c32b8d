// Wraps CUDA on the host besides streams: checks, attributes, the current device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <new>

namespace deepep_moe {

// Throw std::runtime_error if `status` is an error.
void check_cuda(cudaError_t status, const char* what);
int attribute(cudaDeviceAttr which, int device);
// Throw std::runtime_error for what a launcher of csrc/nvshmem has returned, unless it is nullptr.
void check_launch(const char* error);
// Throw std::invalid_argument if the shim of csrc/nvshmem is of another build, or if there is not a PE for each node.
void check_rail(bool is_same_build, size_t num_pes, int num_nodes);

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

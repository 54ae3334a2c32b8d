// CUDA on the host besides streams: checks, attributes, the current device.
#pragma once

#include <cuda_runtime_api.h>

#include <new>

namespace deepep_moe {

// Throw std::runtime_error if `status` is an error.
void check_cuda(cudaError_t status, const char* what);
int attribute(cudaDeviceAttr which, int device);

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

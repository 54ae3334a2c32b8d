// What the host needs of CUDA besides streams: checks, attributes, the current device.
#pragma once

#include <cuda_runtime_api.h>

#include <new>

namespace deepep_moe {

// Throws std::runtime_error.
void check_cuda(cudaError_t status, const char* what);
int attribute(cudaDeviceAttr which, int device);

// The calling thread's device, put back at the end of a scope.
class DeviceGuard {
public:
    explicit DeviceGuard(int device);
    DeviceGuard(int device, std::nothrow_t) noexcept;  // for destructors, of a GPU that may have failed
    ~DeviceGuard();
    DeviceGuard(const DeviceGuard&) = delete;

private:
    int before_ = 0;
    bool changed_ = false;
};

}  // namespace deepep_moe

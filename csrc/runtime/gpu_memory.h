// Memory of the GPUs of one host: a rank's workspace and those of its peers, mapped here. And what the classes beside it need of CUDA.
#pragma once

#include <cuda_runtime_api.h>

#include <new>
#include <string>
#include <vector>

#include "common/types.h"

namespace deepep_moe {

constexpr int kMaxGpus = 8;  // of one host, as ranks of one group

// Throws std::runtime_error.
void check_cuda(cudaError_t status, const char* what);
int attribute(cudaDeviceAttr which, int device);
bool is_capturing(cudaStream_t stream);
inline cudaStream_t as_stream(uintptr_t stream) { return reinterpret_cast<cudaStream_t>(stream); }

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

// Zeroed where it begins; peers map it through CUDA IPC. At the end it waits, a second at most, until all peers are at theirs: their
// kernels may still write here what this rank did not have to wait for.
class GpuMemory {
public:
    GpuMemory(int num_ranks, int rank, int device);
    ~GpuMemory();
    GpuMemory(const GpuMemory&) = delete;

    // left: offset of u64[num_ranks] of this class's own.
    void allocate(int64_t bytes, int64_t zeroed_bytes, int64_t left);
    std::string handle() const;
    void connect(const std::vector<std::string>& handles);
    std::byte* of(int rank) const { return workspaces_[rank]; }

private:
    void leave();

    const int num_ranks_, rank_, device_, owner_pid_;
    int64_t left_ = 0;
    std::byte* workspaces_[kMaxGpus] = {};
};

}  // namespace deepep_moe

// Memory of the GPUs of one host: a rank's workspace and those of its peers, mapped here. And what the classes beside it need of CUDA.
#pragma once

#include <cuda_runtime_api.h>

#include <new>
#include <string>
#include <vector>

#include "common/types.h"
#include "runtime/process.h"

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

// Zeroed where it begins; peers map it through CUDA IPC. It is not freed before all peers have left, or their processes have ended: they
// may still write to it what this rank did not have to wait for, or make a call that nobody makes with them. So at the end it waits for
// them, a second at most; else it stays until they have left and the next GpuMemory of this process is made or destroyed.
class GpuMemory {
public:
    GpuMemory(int num_ranks, int rank, int device);
    ~GpuMemory();
    GpuMemory(const GpuMemory&) = delete;

    // left: offset of u64[num_ranks] of this class's own.
    void allocate(int64_t bytes, int64_t zeroed_bytes, int64_t left);
    std::string handle() const;  // of kHandleBytes
    void connect(const std::vector<std::string>& handles);
    std::byte* of(int rank) const { return workspaces_[rank]; }

    static const size_t kHandleBytes;

private:
    void tell_peers() const;

    const int num_ranks_, rank_, device_, owner_pid_;
    int64_t left_ = 0;
    bool is_connected_ = false;
    std::byte* workspaces_[kMaxGpus] = {};
    Process processes_[kMaxGpus];
};

}  // namespace deepep_moe

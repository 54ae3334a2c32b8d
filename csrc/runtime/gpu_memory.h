// Memory of the GPUs of one host: a rank's workspace and those of its peers, mapped here. And what the classes beside it need of CUDA.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include "common/gpu_wait.h"
#include "common/types.h"
#include "runtime/process.h"
#include "runtime/watch.h"

namespace deepep_moe {

constexpr int kMaxGpus = 8;  // of one host, as ranks of one group

// Throws std::runtime_error.
void check_cuda(cudaError_t status, const char* what);
int attribute(cudaDeviceAttr which, int device);
bool is_capturing(cudaStream_t stream);
unsigned long long capture_of(cudaStream_t stream);  // the number of the capture that goes on there, or 0
inline cudaStream_t as_stream(uintptr_t stream) { return reinterpret_cast<cudaStream_t>(stream); }

// The streams of a buffer's last calls: each call follows the last one on whatever stream, one in a graph the last one captured there.
class LastStreams {
public:
    void follow(cudaStream_t stream, cudaEvent_t event);  // a call begins; event: to record
    void go_on(cudaStream_t stream);                      // the rest of the call is there
    cudaStream_t running() const { return running_.value_or(nullptr); }

private:
    std::optional<cudaStream_t> running_, captured_;
};

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

    // left: offset of `GpuWaits::left`.
    void allocate(int64_t bytes, int64_t zeroed_bytes, int64_t left);
    std::string handle() const;  // of kHandleBytes
    void connect(const std::vector<std::string>& handles);
    std::byte* of(int rank) const { return workspaces_[rank]; }

    // For a kernel; `failure` in host memory, the others in the device's.
    GpuWaits waits(double timeout_s, GpuFailure* failure, int* gave_up, GpuEnded* ended) const;
    // What a kernel of `rank` has reported of a wait in vain.
    std::string describe_lack(const GpuFailure& failure, int rank, double timeout_s) const;
    // Throws it, of this rank.
    [[noreturn]] void raise_lack(const GpuFailure& failure, double timeout_s) const;

    static const size_t kHandleBytes;

private:
    void tell_peers() const;

    const int num_ranks_, rank_, device_, owner_pid_;
    int64_t left_ = 0;
    bool is_connected_ = false;
    std::byte* workspaces_[kMaxGpus] = {};
    Process processes_[kMaxGpus];
    std::atomic<unsigned>* ended_ = nullptr;  // pinned, set by
    std::unique_ptr<Watch> watch_;
};

}  // namespace deepep_moe

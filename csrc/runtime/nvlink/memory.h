// Memory of the GPUs of one host: a rank's workspace and those of its peers, mapped here.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "cuda/waits.h"
#include "common/types.h"
#include "runtime/process.h"
#include "runtime/nvlink/watch.h"

namespace deepep_moe {

constexpr int kMaxGpus = 8;  // of one host, as ranks of one group

// Zeroed where it begins; peers map it through CUDA IPC. It is not freed before all peers have left, or their processes have ended: they
// may still write to it what this rank did not have to wait for, or make a call that nobody makes with them. So at the end it waits for
// them, a second at most; else it stays until they have left and the next GpuMemory of this process is made or destroyed.
class GpuMemory {
public:
    // Of ranks `first_rank` and up, which have these numbers everywhere.
    GpuMemory(int num_ranks, int rank, int device, int first_rank = 0);
    ~GpuMemory();
    GpuMemory(const GpuMemory&) = delete;

    // left: offset of `GpuWaits::left`, of rank 0.
    void allocate(int64_t bytes, int64_t zeroed_bytes, int64_t left);
    std::string handle() const;  // of kHandleBytes
    void connect(const std::vector<std::string>& handles);
    // Unmaps what `connect` has mapped, where some rank could not: once all ranks have, each may free its own.
    void disconnect();
    std::byte* of(int rank) const { return workspaces_[rank - first_]; }

    // For a kernel; `failure` in host memory, the others in the device's.
    GpuWaits waits(double timeout_s, GpuFailure* failure, int* gave_up, GpuEnded* ended) const;
    bool has(int rank) const { return rank >= first_ && rank < first_ + num_ranks_; }
    int process_of(int rank) const { return processes_[rank - first_].pid; }

    static const size_t kHandleBytes;

private:
    void tell_peers() const;

    const int num_ranks_, rank_, first_, index_, device_, owner_pid_;  // index_: this rank's among them
    int64_t left_ = 0;
    bool is_connected_ = false;
    std::byte* workspaces_[kMaxGpus] = {};
    Process processes_[kMaxGpus];
    std::atomic<unsigned>* ended_ = nullptr;  // pinned, set by
    std::unique_ptr<Watch> watch_;
};

}  // namespace deepep_moe

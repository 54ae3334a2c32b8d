// The GPUs of one host and their calls: who owns workspace and scratch, whose memory is mapped here, what failed.
#pragma once

#include <string>
#include <vector>

#include "common/errors.h"
#include "common/gpu_params.h"

namespace deepep_moe {

class GpuCommunicator {
public:
    GpuCommunicator(const GpuWorkspaceConfig& config, int rank, int device, double timeout_s);
    ~GpuCommunicator();
    GpuCommunicator(const GpuCommunicator&) = delete;

    int64_t workspace_bytes() const { return layout_.total_bytes; }
    std::string handle() const;                           // the CUDA IPC handle of the workspace, for the peers
    void connect(const std::vector<std::string>& handles);

    // Each enqueues one call's work on `stream` and returns. `wait_counts` waits for the counts of the last `plan`.
    void plan(GpuPlanParams params, uintptr_t stream);
    GpuCounts wait_counts();
    void dispatch(GpuDispatchParams params, uintptr_t stream);
    void combine(GpuCombineParams params, uintptr_t stream);
    void refuse(uintptr_t stream);
    // Throws what a kernel of this rank has reported so far, once.
    void check();

private:
    GpuContext context() const;
    void complete(GpuRouting& routing) const;
    void allocate_scratch();

    const GpuWorkspaceConfig config_;
    const GpuWorkspaceLayout layout_;
    const int rank_, device_, owner_pid_;
    const double timeout_s_;
    unsigned long long sequence_ = 0;
    std::byte* workspaces_[kMaxGpuRanks] = {};
    std::byte* scratch_ = nullptr;
    GpuRouting scratch_routing_{};
    int* gave_up_ = nullptr;
    struct HostSlots {
        GpuFailure failure;
        GpuCounts counts;
    };
    HostSlots* host_ = nullptr;  // pinned
};

}  // namespace deepep_moe

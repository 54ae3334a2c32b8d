// Makes the part of a call between nodes. Before its plan the rank meets those of its rail and learns what comes from them; rows then cross
// beside the node's kernels. The kernels are in csrc/nvshmem and are called through a shim, because this module does not link NVSHMEM.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "cuda/rail.h"
#include "runtime/nvlink/call.h"

namespace deepep_moe {

class Rail {
public:
    // NvlinkExchange::attach_rail describes the arguments. Uses the current device. Throws std::invalid_argument for another build's shim.
    Rail(const GpuWorkspaceConfig& config, const RailShim& shim, std::byte* base, const std::vector<int>& pes, double timeout_s);
    ~Rail();
    Rail(const Rail&) = delete;

    // Launch the call's first kernel on its stream; the kernels behind it know which tokens are in this node. `handle_counts` is the
    // `recv_counts` of the handle that the call uses, or nullptr.
    void meet(const GpuContext& context, const GpuStamp& stamp, const RailCall& call, const int32_t* handle_counts, cudaStream_t stream);
    // `move` lets rows cross beside the stream, behind the work that was on it at the last `fork`. `join` lets a stream wait for them.
    void fork(cudaStream_t stream);
    void move(const GpuContext& context, int num_tiles, int num_blocks);
    void join(cudaStream_t stream);
    bool is_moving() const { return is_moving_; }  // no `join` has followed the last `move`
    bool is_done() const;

    // Set the rail's parameters of the node's kernels.
    void complete(GpuDispatchParams& params) const;
    void complete(GpuCombineParams& params) const;

    // Return the entry word and the stamp of a call that the rail's rank of another node has written here.
    const std::byte* entered(unsigned long long call, int node) const { return made_.base + made_.layout.entered_of(call, node); }
    const std::byte* stamp(unsigned long long call, int node) const { return made_.base + made_.layout.in_of(call, node); }

private:
    GpuRail view() const;
    void release();

    const GpuWorkspaceConfig config_;
    const RailShim& shim_;
    const unsigned long long timeout_ns_;
    RailContext made_{};  // without the context of a call
    float* node_topk_weights_ = nullptr;
    void* scratch_ = nullptr;
    RailCall call_{};  // the last call
    cudaStream_t stream_ = nullptr;
    cudaEvent_t forked_ = nullptr, moved_ = nullptr;
    bool is_moving_ = false;
};

}  // namespace deepep_moe

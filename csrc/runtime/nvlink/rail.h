// What a call does between nodes: before its plan the rank meets those of its rail and learns what comes from them, and beside the node's
// kernels rows cross. The kernels are those of csrc/nvshmem, by a shim: this module does not link NVSHMEM.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "cuda/rail.h"
#include "runtime/nvlink/call.h"

namespace deepep_moe {

class Rail {
public:
    // As NvlinkExchange::attach_rail, on the current device. Throws std::invalid_argument where the shim is of another build.
    Rail(const GpuWorkspaceConfig& config, const RailShim& shim, std::byte* base, const std::vector<int>& pes, double timeout_s);
    ~Rail();
    Rail(const Rail&) = delete;

    // The call's first kernel, on its stream: the kernels behind it know what is in this node.
    // handle_counts: `recv_counts` of the handle that the call goes along, or nullptr.
    void meet(const GpuContext& context, const GpuStamp& stamp, const RailCall& call, const int32_t* handle_counts, cudaStream_t stream);
    // Rows cross, beside `stream`, behind what is on it by the last `fork`; `join` lets a stream wait for them.
    void fork(cudaStream_t stream);
    void move(const GpuContext& context, int num_tiles, int num_blocks);
    void join(cudaStream_t stream);
    bool is_moving() const { return is_moving_; }  // `join` is to come
    bool is_done() const;

    // What the node's kernels need of the rail.
    void complete(GpuDispatchParams& params) const;
    void complete(GpuCombineParams& params) const;

    // Of the rank of this rail in another node, as it has told: a word of its entry, and what it does in a call.
    const std::byte* entered(unsigned long long call, int node) const { return made_.base + made_.layout.entered_of(call, node); }
    const std::byte* stamp(unsigned long long call, int node) const { return made_.base + made_.layout.in_of(call, node); }

private:
    GpuContext of_rail(GpuContext context) const;
    GpuRail view() const;
    void release();

    const GpuWorkspaceConfig config_;
    const RailShim& shim_;
    const unsigned long long timeout_ns_;
    RailContext made_{};  // without the context of a call
    float* node_topk_weights_ = nullptr;
    void* scratch_ = nullptr;
    RailCall call_{};  // the last one
    cudaStream_t stream_ = nullptr;
    cudaEvent_t forked_ = nullptr, moved_ = nullptr;
    bool is_moving_ = false;
};

}  // namespace deepep_moe

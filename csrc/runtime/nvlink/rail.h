// Makes the parts of calls between nodes. The kernels are in csrc/nvshmem and are called through shims, because this module does not link
// NVSHMEM.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "cuda/launch.h"
#include "cuda/rail.h"
#include "runtime/nvlink/call.h"
#include "runtime/nvlink/memory.h"

namespace deepep_moe {

// Makes the part of a call between nodes. Before its plan the rank meets those of its rail and learns what comes from them; rows then cross
// beside the node's kernels.
class Rail {
public:
    // NvlinkExchange::attach_rail describes the arguments. Uses the current device. Throws std::invalid_argument for another build's shim.
    Rail(const GpuWorkspaceConfig& config, const RailShim& shim, std::byte* base, const std::vector<int>& pes, double timeout_s);
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

    const GpuWorkspaceConfig config_;
    const RailShim& shim_;
    const unsigned long long timeout_ns_;
    RailContext made_{};  // without the context of a call
    float* node_topk_weights_ = nullptr;
    DeviceMemory scratch_;
    RailCall call_{};  // the last call
    Stream stream_;
    Event forked_, moved_;
    bool is_moving_ = false;
};

// Makes the part of a low-latency call between nodes, where rows cross between the ranks of a rail.
class LowLatencyRail {
public:
    // `bases` has the symmetric memory (LowLatencyRailLayout) of the ranks of this node, mapped here, and `pes` NVSHMEM's numbers of the
    // ranks of the rail, by node. Throws std::invalid_argument if the shim is of another build.
    LowLatencyRail(const LowLatencyConfig& config, const RailShim& shim, const std::vector<uintptr_t>& bases, const std::vector<int>& pes,
                   int rank);
    LowLatencyRail(const LowLatencyRail&) = delete;

    // Make halves of a call. num_blocks is the upper bound of a kernel's blocks.
    void send(const LowLatencyContext& context, LowLatencyDispatchParams params, int num_blocks, void* stream);
    void receive(const LowLatencyContext& context, const LowLatencyDispatchParams& params, int num_blocks, void* stream);
    void send(const LowLatencyContext& context, LowLatencyCombineParams params, int num_blocks, void* stream);
    void receive(const LowLatencyContext& context, const LowLatencyCombineParams& params, int num_blocks, void* stream);
    // Make the rail's part of an action between calls. It precedes the node's part, except that kTellReturned follows it.
    void control(const LowLatencyControlParams& params, void* stream);
    // Pass on to this node's ranks what the rail has brought for all dispatches sent so far; their hooks may come later. Call it before any
    // kernel that may wait, because the ranks of a node wait for each other's words. The dispatch whose handle is `but` does this itself.
    // Throws std::invalid_argument in a CUDA graph capture if a dispatch outside of the capture waits for its hook.
    void relay(const LowLatencyContext& context, const std::byte* but, int num_blocks, void* stream);

private:
    LowLatencyRailContext of(const LowLatencyContext& context) const;

    const LowLatencyConfig config_;
    const RailShim& shim_;
    LowLatencyRailContext made_{};  // without the context of a call
    struct Sent {
        LowLatencyDispatchParams params;
        unsigned long long capture;  // number of the CUDA graph that the dispatch is part of, or 0
    };
    std::vector<Sent> to_relay_;
};

}  // namespace deepep_moe

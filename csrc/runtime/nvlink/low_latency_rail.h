// What a low-latency call does besides, where ranks are several nodes: rows cross between the ranks of a rail, in kernels of csrc/nvshmem,
// by a shim: this module does not link NVSHMEM.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "cuda/launch.h"
#include "cuda/low_latency_rail.h"

namespace deepep_moe {

class LowLatencyRail {
public:
    // bases: symmetric memory, LowLatencyRailLayout, of the ranks of this node, mapped here; pes: of the ranks of the rail, by node. Throws
    // std::invalid_argument where the shim is of another build.
    LowLatencyRail(const LowLatencyConfig& config, const LowLatencyRailShim& shim, const std::vector<uintptr_t>& bases,
                   const std::vector<int>& pes, int rank);
    LowLatencyRail(const LowLatencyRail&) = delete;

    // Halves of a call; num_blocks: of a kernel, at most.
    void send_dispatch(const LowLatencyContext& context, LowLatencyDispatchParams params, int num_blocks, void* stream);
    void receive_dispatch(const LowLatencyContext& context, const LowLatencyDispatchParams& params, int num_blocks, void* stream);
    void send_combine(const LowLatencyContext& context, LowLatencyCombineParams params, int num_blocks, void* stream);
    void receive_combine(const LowLatencyContext& context, const LowLatencyCombineParams& params, int num_blocks, void* stream);
    // What is done between calls, ahead of its part in the node, but for kTellReturned.
    void control(const LowLatencyControlParams& params, void* stream);
    // Ranks of a node wait for what others have to tell. So whatever may wait first tells it of all dispatches that were sent, whose hooks
    // may come later. `but`: the handle of one that tells it itself. Throws std::invalid_argument in the capture of a CUDA graph, where one
    // outside of it waits for its hook.
    void relay(const LowLatencyContext& context, const std::byte* but, int num_blocks, void* stream);

private:
    LowLatencyRailContext of(const LowLatencyContext& context) const;

    const LowLatencyConfig config_;
    const LowLatencyRailShim& shim_;
    LowLatencyRailContext made_{};  // without the context of a call
    struct Sent {
        LowLatencyDispatchParams params;
        unsigned long long capture;  // of a CUDA graph that it is part of, or 0
    };
    std::vector<Sent> to_relay_;
};

}  // namespace deepep_moe

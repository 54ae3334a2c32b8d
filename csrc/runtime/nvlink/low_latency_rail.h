// What a low-latency call does besides, where ranks are several nodes: rows cross between the ranks of a rail, in kernels of csrc/nvshmem,
// by a shim: this module does not link NVSHMEM.
#pragma once

#include <vector>

#include "cuda/launch.h"
#include "cuda/low_latency_rail.h"

namespace deepep_moe {

class LowLatencyRail {
public:
    // base: of this rank's symmetric memory, LowLatencyRailLayout; pes: of the ranks of the rail, by node. Throws std::invalid_argument
    // where the shim is of another build.
    LowLatencyRail(const LowLatencyConfig& config, const LowLatencyRailShim& shim, std::byte* base, const std::vector<int>& pes,
                   int ranks_per_node, int rank);

    // Halves of a call; num_blocks: of a kernel, at most.
    void send_dispatch(const LowLatencyContext& context, LowLatencyDispatchParams params, int num_blocks, void* stream);
    void receive_dispatch(const LowLatencyContext& context, const LowLatencyDispatchParams& params, int num_blocks, void* stream);
    void send_combine(const LowLatencyContext& context, LowLatencyCombineParams params, int num_blocks, void* stream);
    void receive_combine(const LowLatencyContext& context, LowLatencyCombineParams params, int num_blocks, void* stream);
    // A refusal, or what comes before a call after one; ahead of that of the node.
    void control(const LowLatencyControlParams& params, int num_blocks, void* stream);

private:
    // Ranks of a node wait for what others have to forward. So whatever may wait first forwards the rows of all dispatches that were sent,
    // whose hooks may come later. Throws std::invalid_argument in the capture of a CUDA graph, where one outside of it waits for its hook.
    void forward(const LowLatencyContext& context, int num_blocks, void* stream);
    LowLatencyRailContext of(const LowLatencyContext& context) const;

    const LowLatencyConfig config_;
    const LowLatencyRailShim& shim_;
    LowLatencyRailContext made_{};  // without the context of a call
    struct Sent {
        LowLatencyDispatchParams params;
        unsigned long long capture;  // of a CUDA graph that it is part of, or 0
    };
    std::vector<Sent> to_forward_;
};

}  // namespace deepep_moe

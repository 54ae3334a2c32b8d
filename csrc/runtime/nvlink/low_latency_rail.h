// Makes the part of a low-latency call between nodes, where rows cross between the ranks of a rail. The kernels are in csrc/nvshmem and are
// called through a shim, because this module does not link NVSHMEM.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "cuda/launch.h"
#include "cuda/low_latency_rail.h"

namespace deepep_moe {

class LowLatencyRail {
public:
    // `bases` has the symmetric memory (LowLatencyRailLayout) of the ranks of this node, mapped here, and `pes` NVSHMEM's numbers of the
    // ranks of the rail, by node. Throws std::invalid_argument if the shim is of another build.
    LowLatencyRail(const LowLatencyConfig& config, const LowLatencyRailShim& shim, const std::vector<uintptr_t>& bases,
                   const std::vector<int>& pes, int rank);
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
    const LowLatencyRailShim& shim_;
    LowLatencyRailContext made_{};  // without the context of a call
    struct Sent {
        LowLatencyDispatchParams params;
        unsigned long long capture;  // number of the CUDA graph that the dispatch is part of, or 0
    };
    std::vector<Sent> to_relay_;
};

}  // namespace deepep_moe

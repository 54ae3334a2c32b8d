// What a rank tells the ranks of its rail between low-latency calls; cuda/low_latency_control.cu tells those of its node.
#include <nvshmem.h>
#include <nvshmemx.h>

#include "nvshmem/low_latency.h"
#include "nvshmem/low_latency_rail.cuh"

namespace deepep_moe {
namespace {

using Launch = LowLatencyRailControl;

constexpr int kThreads = tuning::kLowLatencyThreads;

// All threads: the ranks of other nodes learn of the refusal from the one of the rail, or where it keeps it.
__device__ void refuse(const Launch& l, const RailPuts& rail) {
    LowLatencyWhat what{};
    what.is_refused = true;
    for (int turn = 1; turn < l.rail.num_nodes; ++turn) {
        const int node = rail.node_at(turn);
        auto& reason = *reinterpret_cast<LowLatencyReason*>(rail.message_for(node));
        if (threadIdx.x < sizeof(reason.text)) reason.text[threadIdx.x] = l.call.reason[threadIdx.x];
        if (threadIdx.x == 0) reason.why = {};
        rail.put_message(node, sizeof(LowLatencyReason), what.flag(rail.call, 0));
    }
}

// Before a call after one that was refused, and so not received: until all ranks outside have entered the call before last, as they may
// still read what this rank has put in the one before.
__device__ void catch_up(const Launch& l, const LowLatencyContext& c, unsigned long long call) {
    const int source = static_cast<int>(threadIdx.x);
    if (call <= kMaxInFlight || source >= c.config.num_ranks) return;
    const RailCall before(l.rail, call - kMaxInFlight);
    if (!before.is_outside(source)) return;
    if (source % l.rail.ranks_per_node == l.rail.index) {
        const unsigned long long word = before.wait(before.entered(source), source, GpuPhase::kRailEntry, behind_node_ns(c));
        if (word != 0) before.tell_entered(source, word);
    } else {
        before.wait(Turn(c, c.rank, before.call).entered(source), source, GpuPhase::kRailEntry, behind_node_ns(c));
    }
}

__global__ void __launch_bounds__(kThreads, 1) rail_control(const __grid_constant__ Launch l) {
    const LowLatencyContext& c = l.rail.context;
    const unsigned long long call = next_call(c);
    if (l.call.action == LowLatencyControlParams::kRefuse) refuse(l, RailPuts(l.rail, call));
    if (l.call.action == LowLatencyControlParams::kCatchUp) catch_up(l, c, call);
}

constexpr LowLatencyRailShim kShim{kLowLatencyRailShimBytes, &launch_rail_send,    &launch_rail_weigh,
                                   &launch_rail_sum,         &launch_rail_control, &launch_rail_deliver};

}  // namespace

const char* launch_rail_control(const Launch& l, void* stream) noexcept {
    return try_launch<rail_control>("rail_control", 1, 0, l, stream);
}

const LowLatencyRailShim& low_latency_rail_shim() { return kShim; }

}  // namespace deepep_moe

// What a rank tells the ranks of its rail between low-latency calls; csrc/cuda/low_latency_control.cu tells those of its node.
#include <nvshmem.h>
#include <nvshmemx.h>

#include "nvshmem/low_latency.h"
#include "nvshmem/low_latency_rail.cuh"

namespace deepep_moe {
namespace {

using Launch = LowLatencyRailControl;

constexpr int kThreads = tuning::kLowLatencyThreads;

// All threads: the ranks of the rail learn of the refusal, and tell those of their nodes.
__device__ void refuse(const Launch& l, const RailCallMemory& m) {
    LowLatencyWhat what{};
    what.is_refused = true;
    for (int turn = 1; turn < l.rail.num_nodes; ++turn) {
        const int node = m.node_at(turn);
        if (m.is_lost(node)) continue;
        if (threadIdx.x == 0) {
            LowLatencyRailMessage& message = m.enter(node, what.flag(m.call, 0));
            for (int i = 0; i < static_cast<int>(sizeof(message.reason.text)); ++i) message.reason.text[i] = l.call.reason[i];
        }
        m.put_message(node, sizeof(LowLatencyRailMessage));
    }
}

// Before a call after one that was refused, and so not received: until the rail has entered the call before last.
__device__ void catch_up(const Launch& l, const LowLatencyContext& c, unsigned long long call) {
    const int node = static_cast<int>(threadIdx.x);
    if (call <= kMaxInFlight || node >= l.rail.num_nodes || node == l.rail.node) return;
    const RailCallMemory before(l.rail, call - kMaxInFlight);
    if (!before.is_lost(node)) before.wait_entry(node, behind_node_ns(c));
}

__global__ void __launch_bounds__(kThreads, 1) rail_control(const __grid_constant__ Launch l) {
    const LowLatencyContext& c = l.rail.context;
    const unsigned long long call = next_call(c);
    if (l.call.action == LowLatencyControlParams::kRefuse) refuse(l, RailCallMemory(l.rail, call));
    if (l.call.action == LowLatencyControlParams::kCatchUp) catch_up(l, c, call);
}

constexpr LowLatencyRailShim kShim{kLowLatencyRailShimBytes, &launch_rail_send,   &launch_rail_forward,
                                   &launch_rail_sum,         &launch_rail_finish, &launch_rail_control};

}  // namespace

const char* launch_rail_control(const Launch& l, void* stream) noexcept {
    return try_launch<rail_control>("rail_control", 1, 0, l, stream);
}

const LowLatencyRailShim& low_latency_rail_shim() { return kShim; }

}  // namespace deepep_moe

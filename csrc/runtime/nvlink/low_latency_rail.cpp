#include "runtime/nvlink/low_latency_rail.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "runtime/nvlink/device.h"
#include "runtime/nvlink/streams.h"

namespace deepep_moe {

LowLatencyRail::LowLatencyRail(const LowLatencyConfig& config, const LowLatencyRailShim& shim, const std::vector<uintptr_t>& bases,
                               const std::vector<int>& pes, int rank)
    : config_(config), shim_(shim) {
    made_.ranks_per_node = static_cast<int>(bases.size());
    made_.num_nodes = config.num_ranks / made_.ranks_per_node;
    check_rail(shim.bytes == kLowLatencyRailShimBytes, pes.size(), made_.num_nodes);
    made_.layout = LowLatencyRailLayout(config, made_.num_nodes);
    made_.node = rank / made_.ranks_per_node;
    made_.index = rank % made_.ranks_per_node;
    std::transform(bases.begin(), bases.end(), made_.bases, [](uintptr_t base) { return reinterpret_cast<std::byte*>(base); });
    std::copy(pes.begin(), pes.end(), made_.pes);
}

LowLatencyRailContext LowLatencyRail::of(const LowLatencyContext& context) const {
    LowLatencyRailContext rail = made_;
    rail.context = context;
    return rail;
}

void LowLatencyRail::send(const LowLatencyContext& context, LowLatencyDispatchParams params, int num_blocks, void* stream) {
    params.what.operation = LowLatencyOperation::kDispatch;
    const int num_tasks = made_.num_nodes - 1 + made_.ranks_per_node + params.num_tokens;
    check_launch(shim_.send({of(context), params, std::min(num_tasks, num_blocks)}, stream));
    to_relay_.push_back({params, capture_of(static_cast<cudaStream_t>(stream))});
}

void LowLatencyRail::relay(const LowLatencyContext& context, const std::byte* but, int num_blocks, void* stream) {
    const unsigned long long capture = capture_of(static_cast<cudaStream_t>(stream));
    for (const Sent& sent : to_relay_)
        if (sent.capture == 0 && capture != 0)
            throw std::invalid_argument(
                "a dispatch outside of the CUDA graph that is captured has not been received; call its hook before the capture");
    for (const Sent& sent : std::exchange(to_relay_, {}))  // this drops dispatches of an earlier capture, which are no calls
        if (sent.capture == capture && sent.params.handle != but) launch_low_latency_relay({of(context), sent.params, num_blocks}, stream);
}

void LowLatencyRail::receive(const LowLatencyContext& context, const LowLatencyDispatchParams& params, int num_blocks, void* stream) {
    relay(context, params.handle, num_blocks, stream);
    launch_low_latency_receive({of(context), params, num_blocks}, stream);
}

void LowLatencyRail::send(const LowLatencyContext& context, LowLatencyCombineParams params, int num_blocks, void* stream) {
    params.what.operation = LowLatencyOperation::kCombine;
    relay(context, nullptr, num_blocks, stream);
    // Sums for a token of another node go to the rank of its rail here, into the slot for that node's rank with this rank's index.
    LowLatencyContext pushes = context;
    const int64_t node_bytes = made_.ranks_per_node * config_.num_max_tokens * context.layout.slot_bytes;
    for (int rank = 0; rank < config_.num_ranks; ++rank) {
        const int node = rank / made_.ranks_per_node, here = made_.node * made_.ranks_per_node + rank % made_.ranks_per_node;
        pushes.workspaces[rank] = context.workspaces[here] + (node - made_.node) * node_bytes;
    }
    if (params.what.has_weights) check_launch(shim_.weigh({of(context), params, made_.num_nodes - 1}, stream));
    launch_low_latency(LowLatencyLaunch<LowLatencyCombineParams>{pushes, params, true, false, num_blocks, false}, stream);
    const int64_t num_tasks = (made_.num_nodes - 1) * (1 + config_.num_max_tokens);
    check_launch(shim_.sum({of(context), params, static_cast<int>(std::min<int64_t>(num_tasks, num_blocks))}, stream));
}

void LowLatencyRail::receive(const LowLatencyContext& context, const LowLatencyCombineParams& params, int num_blocks, void* stream) {
    relay(context, nullptr, num_blocks, stream);
    launch_low_latency_finish({of(context), params, num_blocks}, stream);
}

void LowLatencyRail::control(const LowLatencyControlParams& params, void* stream) {
    if (params.action == LowLatencyControlParams::kMask) return;               // other nodes are not told
    if (params.action == LowLatencyControlParams::kRejoin) to_relay_.clear();  // calls that do not count
    check_launch(shim_.control({of(params.context), params, 1}, stream));
}

}  // namespace deepep_moe

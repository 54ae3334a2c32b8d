#include "runtime/nvlink/low_latency_rail.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "runtime/nvlink/streams.h"

namespace deepep_moe {
namespace {

void check_launch(const char* error) {
    if (error != nullptr) throw std::runtime_error(error);
}

int at_most(int64_t num_tasks, int num_blocks) { return static_cast<int>(std::clamp<int64_t>(num_tasks, 1, num_blocks)); }

}  // namespace

LowLatencyRail::LowLatencyRail(const LowLatencyConfig& config, const LowLatencyRailShim& shim, std::byte* base, const std::vector<int>& pes,
                               int ranks_per_node, int rank)
    : config_(config), shim_(shim) {
    if (shim.bytes != kLowLatencyRailShimBytes)
        throw std::invalid_argument("deepep_moe._nvshmem and deepep_moe._C are of different builds: install deepep_moe again");
    made_.num_nodes = config.num_ranks / ranks_per_node;
    if (static_cast<int>(pes.size()) != made_.num_nodes)
        throw std::invalid_argument(std::to_string(pes.size()) + " PEs were given for " + std::to_string(made_.num_nodes) + " nodes");
    made_.layout = LowLatencyRailLayout(config, made_.num_nodes);
    made_.base = base;
    made_.ranks_per_node = ranks_per_node;
    made_.node = rank / ranks_per_node;
    made_.index = rank % ranks_per_node;
    std::copy(pes.begin(), pes.end(), made_.pes);
}

LowLatencyRailContext LowLatencyRail::of(const LowLatencyContext& context) const {
    LowLatencyRailContext rail = made_;
    rail.context = context;
    return rail;
}

void LowLatencyRail::send_dispatch(const LowLatencyContext& context, LowLatencyDispatchParams params, int num_blocks, void* stream) {
    params.what.operation = LowLatencyOperation::kDispatch;
    const int64_t num_chunks = (params.num_tokens + kLowLatencyRailRows - 1) / kLowLatencyRailRows;
    const int64_t num_tasks = (made_.num_nodes - 1) * (1 + num_chunks) + made_.ranks_per_node + params.num_tokens;
    check_launch(shim_.send({of(context), params, at_most(num_tasks, num_blocks)}, stream));
    to_forward_.push_back({params, capture_of(static_cast<cudaStream_t>(stream))});
}

void LowLatencyRail::forward(const LowLatencyContext& context, int num_blocks, void* stream) {
    const unsigned long long capture = capture_of(static_cast<cudaStream_t>(stream));
    for (const Sent& sent : to_forward_)
        if (sent.capture == 0 && capture != 0)
            throw std::invalid_argument(
                "a dispatch outside of the CUDA graph that is captured has not been received; call its hook before the capture");
    for (const Sent& sent : std::exchange(to_forward_, {}))  // what a capture before has left is no call
        if (sent.capture == capture)
            check_launch(
                shim_.forward({of(context), sent.params, at_most(made_.ranks_per_node + config_.num_max_tokens, num_blocks)}, stream));
}

void LowLatencyRail::receive_dispatch(const LowLatencyContext& context, const LowLatencyDispatchParams& params, int num_blocks,
                                      void* stream) {
    forward(context, num_blocks, stream);
    launch_low_latency_dispatch({context, params, false, true, num_blocks}, stream);
}

void LowLatencyRail::send_combine(const LowLatencyContext& context, LowLatencyCombineParams params, int num_blocks, void* stream) {
    params.what.operation = LowLatencyOperation::kCombine;
    forward(context, num_blocks, stream);
    // Sums for a token of another node go to the rank of its rail here, to where a rank of that node with this one's index would put its
    // own.
    LowLatencyContext pushes = context;
    const int64_t node_bytes = made_.ranks_per_node * config_.num_max_tokens * context.layout.slot_bytes;
    for (int rank = 0; rank < config_.num_ranks; ++rank) {
        const int node = rank / made_.ranks_per_node, here = made_.node * made_.ranks_per_node + rank % made_.ranks_per_node;
        pushes.workspaces[rank] = context.workspaces[here] + (node - made_.node) * node_bytes;
    }
    launch_low_latency_combine({pushes, params, true, false, num_blocks, false}, stream);
    const int64_t num_chunks = (config_.num_max_tokens + kLowLatencyRailRows - 1) / kLowLatencyRailRows;
    check_launch(shim_.sum({of(context), params, at_most((made_.num_nodes - 1) * (1 + num_chunks), num_blocks)}, stream));
}

void LowLatencyRail::receive_combine(const LowLatencyContext& context, LowLatencyCombineParams params, int num_blocks, void* stream) {
    params.what.operation = LowLatencyOperation::kCombine;
    forward(context, num_blocks, stream);
    const int64_t threads = kLineBytes / 16 * GpuLowLatencyLayout::lines_of(config_.hidden / 4);  // for a token, at most
    const int64_t num_tasks = params.num_tokens * ((threads + tuning::kLowLatencyThreads - 1) / tuning::kLowLatencyThreads);
    check_launch(shim_.finish({of(context), params, at_most(num_tasks, num_blocks)}, stream));
}

void LowLatencyRail::control(const LowLatencyControlParams& params, int num_blocks, void* stream) {
    forward(params.context, num_blocks, stream);
    check_launch(shim_.control({of(params.context), params, 1}, stream));
}

}  // namespace deepep_moe

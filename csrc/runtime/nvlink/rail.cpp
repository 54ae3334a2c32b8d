#include "runtime/nvlink/rail.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "runtime/nvlink/streams.h"

namespace deepep_moe {
namespace {

// Throw std::runtime_error for what a launcher of csrc/nvshmem has returned, unless it is nullptr.
void check_launch(const char* error) {
    if (error != nullptr) throw std::runtime_error(error);
}

// Throw std::invalid_argument if the shim of csrc/nvshmem is of another build, or if there is not a PE for each node.
void check_rail(const RailShim& shim, size_t num_pes, int num_nodes) {
    if (shim.bytes != kRailShimBytes)
        throw std::invalid_argument("deepep_moe._nvshmem and deepep_moe._C are of different builds: install deepep_moe again");
    if (static_cast<int>(num_pes) != num_nodes)
        throw std::invalid_argument(std::to_string(num_pes) + " PEs were given for " + std::to_string(num_nodes) + " nodes");
}

}  // namespace

// ---- dispatch and combine ----

Rail::Rail(const GpuWorkspaceConfig& config, const RailShim& shim, std::byte* base, const std::vector<int>& pes, double timeout_s)
    : config_(config), shim_(shim), timeout_ns_(static_cast<unsigned long long>(timeout_s * 1e9)) {
    check_rail(shim, pes.size(), config.num_nodes);
    made_.layout = RailLayout(config);
    made_.base = base;
    std::copy(pes.begin(), pes.end(), made_.pes);
    const int64_t tokens = config.num_max_tokens, chunks = int64_t{config.num_nodes} * made_.layout.num_chunks;
    const Array arrays[] = {array_of(&made_.state, 1),
                            array_of(&made_.ready, chunks),
                            array_of(&made_.summed, chunks),
                            array_of(&made_.slots, tokens),
                            array_of(&made_.tokens, tokens),
                            array_of(&made_.out_counts, config.num_nodes),
                            array_of(&node_topk_weights_, tokens * config.num_topk)};
    allocate_arrays(scratch_, arrays, "cannot allocate the scratch of the rail");
    stream_ = new_urgent_stream();  // kernels of the node wait for the rail's few blocks
    forked_ = new_event(), moved_ = new_event();
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

void Rail::meet(const GpuContext& context, const GpuStamp& stamp, const RailCall& call, const int32_t* handle_counts, cudaStream_t stream) {
    call_ = call;
    call_.meet.node_topk_weights = node_topk_weights_, call_.meet.handle_counts = handle_counts;
    RailMeetParams params{{made_, stamp}, call_.meet};
    params.rail.context = context, params.rail.context.timeout_ns = timeout_ns_;  // an earlier deadline than the node's
    check_launch(shim_.meet(params, stream));
    fork(stream);
}

void Rail::fork(cudaStream_t stream) {
    record(forked_, stream);
    wait(stream_, forked_);
}

void Rail::move(const GpuContext& context, int num_tiles, int num_blocks) {
    RailMoveParams params{{made_, timeout_ns_}, call_.move};
    params.rail.context = context;
    params.num_blocks = num_blocks;  // one of their warps polls for arrivals
    params.num_tiles = num_tiles;
    check_launch(shim_.move(params, stream_));
    record(moved_, stream_);
    is_moving_ = true;
}

void Rail::join(cudaStream_t stream) {
    if (std::exchange(is_moving_, false)) wait(stream, moved_);
}

bool Rail::is_done() const { return is_ready(cudaStreamQuery(stream_)); }

GpuRail Rail::view() const {
    const std::byte* inbox = made_.base + made_.layout.inbox;
    std::byte* outbox = made_.base + made_.layout.outbox;
    const RailMeetCall& meet = call_.meet;
    const auto* experts = static_cast<const int32_t*>(meet.topk.topk_idx);  // int32 only in a cached call
    return {inbox, outbox, made_.ready, made_.summed, meet.topk.num_tokens, made_.slots, meet.cached ? experts : nullptr};
}

void Rail::complete(GpuDispatchParams& params) const {
    params.rail = view();
    if (!call_.meet.has_weights) return;
    params.topk_weights = {node_topk_weights_, config_.num_topk, 1};
}

void Rail::complete(GpuCombineParams& params) const { params.rail = view(); }

// ---- low latency ----

LowLatencyRail::LowLatencyRail(const LowLatencyConfig& config, const RailShim& shim, const std::vector<uintptr_t>& bases,
                               const std::vector<int>& pes, int rank)
    : config_(config), shim_(shim) {
    made_.ranks_per_node = static_cast<int>(bases.size());
    made_.num_nodes = config.num_ranks / made_.ranks_per_node;
    check_rail(shim, pes.size(), made_.num_nodes);
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

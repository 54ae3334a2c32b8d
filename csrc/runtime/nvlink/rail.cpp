#include "runtime/nvlink/rail.h"

#include <algorithm>
#include <utility>

#include "runtime/nvlink/device.h"
#include "runtime/nvlink/streams.h"

namespace deepep_moe {

Rail::Rail(const GpuWorkspaceConfig& config, const RailShim& shim, std::byte* base, const std::vector<int>& pes, double timeout_s)
    : config_(config), shim_(shim), timeout_ns_(static_cast<unsigned long long>(timeout_s * 1e9)) {
    check_rail(shim.bytes == kRailShimBytes, pes.size(), config.num_nodes);
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
    try {
        allocate_arrays(&scratch_, arrays, "cannot allocate the scratch of the rail");
        stream_ = new_urgent_stream();  // kernels of the node wait for the rail's few blocks
        forked_ = new_event(), moved_ = new_event();
        check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    } catch (...) {
        release();
        throw;
    }
}

Rail::~Rail() { release(); }

void Rail::release() {
    for (cudaEvent_t event : {forked_, moved_})
        if (event != nullptr) cudaEventDestroy(event);
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
    cudaFree(scratch_);
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

}  // namespace deepep_moe

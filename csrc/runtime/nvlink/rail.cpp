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
    const std::pair<void**, int64_t> arrays[] = {
        {reinterpret_cast<void**>(&made_.state), sizeof(RailState)},
        {reinterpret_cast<void**>(&made_.ready), 8 * chunks},
        {reinterpret_cast<void**>(&made_.summed), 8 * chunks},
        {reinterpret_cast<void**>(&made_.slots), 4 * tokens},
        {reinterpret_cast<void**>(&made_.tokens), 4 * tokens},
        {reinterpret_cast<void**>(&made_.out_counts), 4 * config.num_nodes},
        {reinterpret_cast<void**>(&node_topk_weights_), 4 * tokens * config.num_topk},
    };
    int64_t total = 0;
    for (const auto& [pointer, bytes] : arrays) total += divide_up(bytes, 128) * 128;
    try {
        check_cuda(cudaMalloc(&scratch_, total), "cannot allocate the scratch of the rail");
        check_cuda(cudaMemset(scratch_, 0, total), "cudaMemset");
        auto* next = static_cast<std::byte*>(scratch_);
        for (const auto& [pointer, bytes] : arrays) {
            *pointer = next;
            next += divide_up(bytes, 128) * 128;
        }
        int least = 0, greatest = 0;  // highest priority for the rail's few blocks, because kernels of the node wait for them
        check_cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
        check_cuda(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest), "cudaStreamCreate");
        for (cudaEvent_t* event : {&forked_, &moved_})
            check_cuda(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "cudaEventCreate");
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
    RailMeetParams params{};
    params.rail = made_;
    params.rail.context = of_rail(context);
    params.stamp = stamp;
    params.cached = call.is_cached;
    params.topk_idx = call.routing.topk_idx;
    params.token_stride = call.routing.token_stride;
    params.lane_stride = call.routing.lane_stride;
    params.is_int64 = call.routing.is_int64;
    params.num_tokens = call.routing.num_tokens;
    params.has_weights = call.has_weights;
    params.topk_weights = call.topk_weights;
    params.weights_token_stride = call.weights_token_stride;
    params.weights_lane_stride = call.weights_lane_stride;
    params.narrow_topk_idx = call.routing.narrow_topk_idx;
    params.node_topk_idx = call.node_topk_idx;
    params.node_topk_weights = node_topk_weights_;
    params.in_counts = call.in_counts;
    params.handle_counts = handle_counts;
    check_launch(shim_.meet(params, stream));
    call_ = call;
    fork(stream);
}

// The rail's kernels have an earlier deadline than the node's.
GpuContext Rail::of_rail(GpuContext context) const {
    context.timeout_ns = timeout_ns_;
    return context;
}

void Rail::fork(cudaStream_t stream) {
    check_cuda(cudaEventRecord(forked_, stream), "cudaEventRecord");
    check_cuda(cudaStreamWaitEvent(stream_, forked_, 0), "cudaStreamWaitEvent");
}

void Rail::move(const GpuContext& context, int num_tiles, int num_blocks) {
    const RailCall& call = call_;
    RailMoveParams params{};
    params.rail = made_;
    params.rail.context = context;
    params.timeout_ns = timeout_ns_;
    params.is_combine = call.is_combine;
    params.num_blocks = num_blocks;  // one of their warps polls for arrivals
    params.num_tiles = num_tiles;
    params.row_bytes = call.row_bytes;
    params.tail_bytes = call.tail_bytes;
    params.x = call.x;
    params.x_scales = call.x_scales;
    params.in_counts = call.in_counts;
    check_launch(shim_.move(params, stream_));
    check_cuda(cudaEventRecord(moved_, stream_), "cudaEventRecord");
    is_moving_ = true;
}

void Rail::join(cudaStream_t stream) {
    if (std::exchange(is_moving_, false)) check_cuda(cudaStreamWaitEvent(stream, moved_, 0), "cudaStreamWaitEvent");
}

bool Rail::is_done() const {
    const cudaError_t status = cudaStreamQuery(stream_);
    if (status != cudaErrorNotReady) check_cuda(status, "the GPU failed");
    return status == cudaSuccess;
}

GpuRail Rail::view() const {
    const std::byte* inbox = made_.base + made_.layout.inbox;
    std::byte* outbox = made_.base + made_.layout.outbox;
    const auto* experts = static_cast<const int32_t*>(call_.routing.topk_idx);  // int32 only in a cached call
    return {inbox, outbox, made_.ready, made_.summed, call_.routing.num_tokens, made_.slots, call_.is_cached ? experts : nullptr};
}

void Rail::complete(GpuDispatchParams& params) const {
    params.rail = view();
    if (!call_.has_weights) return;
    params.topk_weights = node_topk_weights_;
    params.weights_token_stride = config_.num_topk;
    params.weights_lane_stride = 1;
}

void Rail::complete(GpuCombineParams& params) const { params.rail = view(); }

}  // namespace deepep_moe

// Brings the weights of a low-latency combine over nodes. This kernel runs before the node's sending kernel, which then finds weights of
// other nodes as if their ranks were in this one. One block for each other node puts this rank's weights there and waits for those of the
// rail's rank there. It pushes these, in heads like a dispatch's, to the ranks of this node that have rows of the token.
#include <nvshmem.h>
#include <nvshmemx.h>

#include "nvshmem/low_latency_combine.cuh"
#include "nvshmem/rail.h"

namespace deepep_moe {
namespace {

using Launch = LowLatencyRailCombine;

constexpr int kThreads = tuning::kLowLatencyThreads, kWarps = kThreads / 32;

struct Shared {
    unsigned long long word;  // the word of the rail's rank in the block's node
};

struct Weigher : RailCombine {
    using RailCombine::RailCombine;

    __device__ static Shared& shared() { return *shared_memory<Shared>(); }

    __device__ void run() const {
        const bool failed = has_failed();
        const int node = rail.node_at(1 + static_cast<int>(blockIdx.x));
        if (blockIdx.x == 0 && warp == 0) enter_node(failed);
        failed ? refuse(node) : send(node);
        if (threadIdx.x == 0) shared().word = hear(rail.rank_in(node));
        __syncthreads();
        if (!failed && ((shared().word ^ flag) >> kValueBitsOfFlag) == 0) push(node);
    }

    __device__ void send(int node) const {
        auto* const to = reinterpret_cast<float*>(rail.message_for(node) + rail.r.layout.weights);
        const int num_lanes = p.num_tokens * config.num_topk;
#pragma unroll 1
        for (int at = threadIdx.x; at < num_lanes; at += kThreads) to[at] = p.topk_weights[at];
        rail.put_weights(node, int64_t{4} * num_lanes, own_word());
    }

    // Refuse instead of sending weights, so that the other rank does not wait for them.
    __device__ void refuse(int node) const {
        if (threadIdx.x == 0) rail.write_reason(node, failed_handle());
        rail.put_message(node, sizeof(LowLatencyReason), refusing_word());
    }

    // Wait for the rail's rank, and tell this node's ranks, which wait for it too, its word or that it did not come. One thread calls it.
    __device__ unsigned long long hear(int source) const {
        const unsigned long long word = rail.wait_weights_to_tell(source, flag);
        rail.tell_entered(source, word != 0 ? word : rail.call << kWhatBits | LowLatencyWhat::kAbsent << kValueBitsOfFlag);
        return word;
    }

    // Each warp pushes the weights of one token of the rail's rank in a node.
    __device__ void push(int node) const {
        const int num_tokens = tokens_of(node), num_parts = static_cast<int>(c.layout.head_bytes / 16), source = rail.rank_in(node);
#pragma unroll 1
        for (int token = warp; token < num_tokens; token += kWarps) {
            const unsigned masks = __shfl_sync(kFullWarp, masks_of(c), 0);  // the same value in all threads
            LowLatencyLane entry{-1, 0, 0.0f};
            if (lane < config.num_topk) entry.weight = __ldcg(rail.weights(source, token) + lane);
            const uint4 part = head_part(entry, flag);
#pragma unroll 1
            for (unsigned rest = ranks_of(node, token) & ~(masks >> rail.first_rank()); rest != 0; rest &= rest - 1)
                store_part(Turn(c, rail.first_rank() + __ffs(rest) - 1, rail.call).head(source, token) + lane, part, lane < num_parts);
        }
    }
};

__global__ void __launch_bounds__(kThreads, 1) rail_weigh(const __grid_constant__ Launch l) {
    let_next_kernel_start();
    wait_for_kernel_before();
    Weigher(l, next_call(l.rail.context)).run();
}

}  // namespace

const char* launch_rail_weigh(const Launch& l, void* stream) noexcept {
    return why_failed([&] { launch<rail_weigh>("rail_weigh", l.num_blocks, kThreads, sizeof(Shared), l, stream, starts_early()); });
}

}  // namespace deepep_moe

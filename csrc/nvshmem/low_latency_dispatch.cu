// Sends in a low-latency dispatch over nodes. It works as in one node (cuda/device/low_latency_send.cuh), and also sends each other node a
// message and the rows that cross, stored once. It waits for nobody. The receiving half reads both where the network has written them
// (cuda/low_latency_dispatch.cu).
#include <nvshmem.h>
#include <nvshmemx.h>

#include "cuda/device/low_latency_send.cuh"
#include "nvshmem/low_latency_rail.cuh"
#include "nvshmem/rail.h"

namespace deepep_moe {
namespace {

using Launch = LowLatencyRailDispatch;

constexpr int kThreads = SendShared::kThreads, kWarps = kThreads / 32;

struct Shared {
    SendShared sending;
    int marks[];
};

template <bool kQuantized>
struct OtherNodes {
    static constexpr bool kIsAny = true;
    const RailPuts rail;
    const LowLatencyDispatchParams& p;

    __device__ int first_rank() const { return rail.first_rank(); }
    __device__ int num_ranks() const { return rail.r.ranks_per_node; }
    __device__ int num_nodes() const { return rail.r.num_nodes; }

    // Returns the ranks of all nodes that are not masked and whose rail's rank is not masked. Ranks outside are reached through that one.
    __device__ unsigned reached(unsigned masks) const {
        unsigned lost = masks;
        for (int node = 0; node < num_nodes(); ++node)
            if (node != rail.r.node && (masks >> rail.rank_in(node) & 1) != 0) lost |= rail.ranks_of(node);
        return ~lost;
    }

    // Send the message to the turn-th node after this one, or only count what is dropped if its rank is masked. All threads call it.
    template <class Sender>
    __device__ void tell(const Sender& s, int turn, bool accepted) const {
        const int node = rail.node_at(turn);
        const unsigned reached = this->reached(masks_of(rail.c));
        LowLatencyWhat what = p.what;
        what.is_refused = !accepted;
        if (accepted) write_routing(s, node, reached);
        if (!accepted && threadIdx.x == 0) rail.write_reason(node, refusal());
        const int64_t routing_bytes =
            rail.r.layout.lanes + static_cast<int64_t>(sizeof(LowLatencyLane)) * p.num_tokens * rail.c.config.num_topk;
        rail.put_message(node, accepted ? routing_bytes : static_cast<int64_t>(sizeof(LowLatencyReason)),
                         what.flag(rail.call, p.num_tokens));
    }

    // Store a row as it crosses, once for all nodes that it goes to.
    template <class Sender>
    __device__ void keep_piece(const Sender& s, int token, int at, const uint4& piece) const {
        pieces(row(s, token))[at] = piece;
    }
    template <class Sender>
    __device__ void keep_scale(const Sender& s, int token, int at, float scale) const {
        reinterpret_cast<float*>(row(s, token) + 16 * s.num_pieces)[at] = scale;
    }

    // Put a row, which the block has stored before it met, to all nodes that it goes to. The last warp begins, because it loads no columns;
    // it puts while the others go on. All threads call it.
    template <class Sender>
    __device__ void put(const Sender& s, int token, unsigned ranks) const {
#pragma unroll 1
        for (int turn = 1 + (2 * kWarps - 2 - s.warp) % kWarps; turn < num_nodes(); turn += kWarps) {
            const int node = rail.node_at(turn);
            if ((ranks & rail.ranks_of(node)) != 0) rail.put_row(node, token, row(s, token), row_bytes(s), s.flag);
        }
    }

private:
    template <class Sender>
    __device__ int64_t row_bytes(const Sender& s) const {
        return rail_row_bytes(rail.c.config, 16 * static_cast<int64_t>(s.num_pieces), kQuantized);
    }
    template <class Sender>
    __device__ std::byte* row(const Sender& s, int token) const {
        return rail.row_for(rail.node_at(1), token, row_bytes(s));
    }

    // Write the counts and top-k entries of a node's message. `reached` has the ranks of all nodes.
    template <class Sender>
    __device__ void write_routing(const Sender& s, int node, unsigned reached) const {
        std::byte* const message = rail.message_for(node);
        auto* const counts = reinterpret_cast<int32_t*>(message);
        auto* const lanes = reinterpret_cast<LowLatencyLane*>(message + rail.r.layout.lanes);
        const int num_experts = rail.experts_of_node(), first = node * num_experts;
#pragma unroll 1
        for (int expert = threadIdx.x; expert < num_experts; expert += kThreads) {
            const int count = s.marks.count(first + expert);
            const bool is_reached = (reached >> (first + expert) / s.num_local & 1) != 0;
            counts[expert] = is_reached ? count : 0;
            if (!is_reached && count > 0) s.drop(count);
        }
#pragma unroll 1
        for (int at = threadIdx.x; at < p.num_tokens * rail.c.config.num_topk; at += kThreads) {
            const int64_t expert = expert_at(p, at) - first;
            const bool is_there = expert >= 0 && expert < num_experts && (reached >> (first + expert) / s.num_local & 1) != 0;
            LowLatencyLane lane{-1, 0, p.topk_weights != nullptr ? p.topk_weights[at] : 1.0f};
            if (is_there) {
                lane.expert = static_cast<int16_t>(expert);
                lane.index = static_cast<uint16_t>(s.marks.before(at / rail.c.config.num_topk, static_cast<int>(first + expert)));
            }
            lanes[at] = lane;
        }
    }
};

template <DType kType, bool kQuantized>
__global__ void __launch_bounds__(kThreads, 2) rail_send(const __grid_constant__ Launch l) {
    let_next_kernel_start();
    wait_for_kernel_before();
    const LowLatencyContext& c = l.rail.context;
    const unsigned long long call = next_call(c);
    Shared& shared = *shared_memory<Shared>();
    const OtherNodes<kQuantized> others{RailPuts(l.rail, call), l.call};
    Sender<kType, kQuantized, OtherNodes<kQuantized>>(c, l.call, others, shared.sending, shared.marks, call).send();
    end_send(c, call);
}

}  // namespace

const char* launch_rail_send(const Launch& l, void* stream) noexcept {
    const LowLatencyConfig& config = l.rail.context.config;
    const int64_t bytes =
        static_cast<int64_t>(sizeof(Shared)) + 4 * config.num_experts * ((config.num_max_tokens / config.lanes + 31) / 32);
    return why_failed([&] {
        with_types(l.call.what, [&](auto dtype, auto fp8) {
            launch<rail_send<dtype.value, fp8.value>>("rail_send", l.num_blocks, kThreads, bytes, l, stream, starts_early());
        });
    });
}

}  // namespace deepep_moe

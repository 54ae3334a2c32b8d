// Between low-latency calls the ranks of a rail exchange words here. cuda/low_latency_control.cu has the part within a node.
#include <nvshmem.h>
#include <nvshmemx.h>

#include "nvshmem/low_latency_rail.cuh"
#include "nvshmem/rail.h"

namespace deepep_moe {
namespace {

using Launch = LowLatencyRailControl;

constexpr int kThreads = tuning::kLowLatencyThreads;

// Send the refusal to the rail's ranks. Others learn of it from these, or read it in their memory. All threads call it.
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

// Catch up before the call after a refused one: wait until all ranks outside have entered the call before last. Until then they may still
// read what this rank has put in the call before that.
__device__ void catch_up(const Launch& l, const LowLatencyContext& c, unsigned long long call) {
    const int source = static_cast<int>(threadIdx.x);
    if (call <= kMaxInFlight || source >= c.config.num_ranks) return;
    const RailCall before(l.rail, call - kMaxInFlight);
    if (!before.is_outside(source) || !takes_part(c, source, before.call)) return;
    if (source % l.rail.ranks_per_node == l.rail.index) {
        const unsigned long long word = before.wait(before.entered(source), source, GpuPhase::kRailEntry, behind_node_ns(c));
        if (word != 0) before.tell_entered(source, word);
    } else {
        before.wait(Turn(c, c.rank, before.call).entered(source), source, GpuPhase::kRailEntry, behind_node_ns(c));
    }
}

// Before a rank of this rail is taken back, wait until all that it has sent has landed. All threads call it.
__device__ void await_return(const LowLatencyContext& c, const RailPuts& rail, int rank) {
    __shared__ bool is_back;
    unsigned long long* const word = rail.returned(rail.node_of(rank));
    if (threadIdx.x == 0) is_back = !gave_up(c) && wait_word(c, word, 1, rank, GpuPhase::kRejoin) != 0;
    __syncthreads();
    if (!is_back) return;
    if (threadIdx.x == 0) *word = 0;
    rail.forget(rail.node_of(rank));
}

// After this rank has taken `rank` back, tell `rank` before which call each rank of this node does so; thread i hears of rank i. If one has
// not taken it back, it stays masked. One warp calls it.
__device__ void tell_returned(const LowLatencyContext& c, const RailPuts& rail, int rank) {
    const int lane = static_cast<int>(threadIdx.x), peer = rail.first_rank() + lane;
    unsigned long long next = 1;
    if (lane < rail.r.ranks_per_node) {
        unsigned long long* const word = resumed_at(c, c.rank, peer);
        next = wait_word(c, word, next_call(c) + 1, peer, GpuPhase::kRejoin);  // not the word of an earlier failed return
        *word = 0;
    }
    const bool is_missed = __any_sync(kFullWarp, next == 0);
    if (is_missed && lane == 0) set_mask(c, rank, true);
    if (!is_missed && lane < rail.r.ranks_per_node) rail.tell_resumed(rail.node_of(rank), peer, next);
}

// Come back once this rank's puts have landed: copy the words from ranks of other nodes to where this node's ranks write theirs. If one
// does not come, take this rank's own word back, so that no rank keeps it for the next return. One warp calls it.
__device__ void rejoin(const LowLatencyContext& c, const RailPuts& rail) {
    const int peer = static_cast<int>(threadIdx.x);
    const bool is_outside = peer < c.config.num_ranks && rail.is_outside(peer);
    const auto tell_nodes = [&](bool has_returned) {
        if (peer < rail.r.num_nodes && peer != rail.r.node) rail.tell_returned(peer, has_returned);
    };
    if (is_outside) *rail.resumed(peer) = 0;
    __syncwarp();
    tell_nodes(true);
    unsigned long long next = 1;
    if (is_outside) {
        next = wait_word(c, rail.resumed(peer), 1, peer, GpuPhase::kRejoin);
        *resumed_at(c, c.rank, peer) = next;
    }
    if (__any_sync(kFullWarp, next == 0)) tell_nodes(false);
}

__global__ void __launch_bounds__(kThreads, 1) rail_control(const __grid_constant__ Launch l) {
    const LowLatencyContext& c = l.rail.context;
    const unsigned long long call = next_call(c);
    const RailPuts rail(l.rail, call);
    const int rank = l.call.rank;
    const bool is_of_rail = rail.is_outside(rank) && rank % l.rail.ranks_per_node == l.rail.index;
    switch (l.call.action) {
        case LowLatencyControlParams::kMask: return;
        case LowLatencyControlParams::kUnmask: return is_of_rail ? await_return(c, rail, rank) : void();
        case LowLatencyControlParams::kTellReturned:
            return is_of_rail && !gave_up(c) && threadIdx.x < 32 ? tell_returned(c, rail, rank) : void();
        case LowLatencyControlParams::kRejoin: return threadIdx.x < 32 ? rejoin(c, rail) : void();
        case LowLatencyControlParams::kRefuse: return refuse(l, rail);
        case LowLatencyControlParams::kCatchUp: return catch_up(l, c, call);
    }
}

}  // namespace

const char* launch_rail_control(const Launch& l, void* stream) noexcept {
    // Earlier puts must not land after those that follow the return.
    const bool returns = l.call.action == LowLatencyControlParams::kRejoin || l.call.action == LowLatencyControlParams::kUnmask;
    if (returns) nvshmemx_quiet_on_stream(static_cast<cudaStream_t>(stream));
    return why_failed([&] { launch<rail_control>("rail_control", 1, kThreads, 0, l, stream); });
}

}  // namespace deepep_moe

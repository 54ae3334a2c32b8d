// Actions between low-latency calls: mask ranks, take them back, rejoin, refuse a call, catch up. One block runs them; it waits for peers
// to come back, and to catch up on a call that this rank has not received.
#include "cuda/device/launch.cuh"
#include "cuda/device/low_latency_lines.cuh"
#include "cuda/launch.h"

namespace deepep_moe {
namespace {

constexpr int kThreads = tuning::kLowLatencyControlThreads;

__device__ bool is_over_nodes(const LowLatencyContext& c) { return c.ranks_per_node < static_cast<unsigned>(c.config.num_ranks); }

// Clear the flags that lie here for `source`. Its lines stay if the rank that comes back is of another node, because the rank of its rail
// in this node wrote them. All threads call it.
__device__ void forget_flags(const LowLatencyContext& c, int source, bool has_lines) {
    for (int turn = 0; turn < kTurns; ++turn) {
        const Turn own_turn(c, c.rank, turn);
        if (threadIdx.x == 0) *own_turn.entered(source) = 0;
        for (int expert = threadIdx.x; expert < c.config.num_local_experts; expert += kThreads) own_turn.counts(source)[expert] = 0;
        if (is_over_nodes(c))
            for (int token = threadIdx.x; token < c.config.num_max_tokens; token += kThreads) *own_turn.landed(source, token) = 0;
        const int64_t num_lines = has_lines ? c.config.num_max_tokens * c.layout.slot_bytes / kLineBytes : 0;
        for (int64_t line = threadIdx.x; line < num_lines; line += kThreads)
            own_turn.head(source, 0)[line * kPartsOfLine + kLinePieces] = make_uint4(0, 0, 0, 0);
    }
}

// Clear the flags that a rank which comes back has written, because it may repeat calls that it has sent. All threads call it.
__device__ void forget(const LowLatencyContext& c, int rank) {
    for (unsigned rest = masked_with(c, rank); rest != 0; rest &= rest - 1) forget_flags(c, __ffs(rest) - 1, is_in_node(c, rank));
    __syncthreads();
}

// Wait until all peers have said which call comes next, plus 1. Return 0 if they do not agree. A peer's word may hold a smaller number from
// an earlier failed return, until the peer writes another.
__device__ unsigned long long resumed_call(const LowLatencyContext& c) {
    const auto load = [](const unsigned long long* from) { return load_acquire(from); };
    unsigned long long next = 0;
    for (int peer = 0; peer < c.config.num_ranks; ++peer) {
        if (peer == c.rank) continue;
        const unsigned long long* const word = resumed_at(c, c.rank, peer);
        const unsigned long long peer_next = watch_word<kLowLatencyPauseNs>(c, word, load, next > 0 ? next : 1, peer, c.timeout_ns);
        if (peer_next == 0) report_lack(c, peer, GpuPhase::kRejoin, 1, peer_next);
        if (peer_next != 0 && peer_next < next)
            report(c, kMismatch, peer, GpuPhase::kRejoin, static_cast<long long>(next) - 1, static_cast<long long>(peer_next) - 1);
        if (peer_next == 0 || peer_next < next) return 0;
        if (peer_next > next) next = peer_next, peer = -1;  // start again: the peers before must say it too
    }
    return next;
}

__device__ void rejoin(const LowLatencyContext& c) {
    const unsigned long long next = resumed_call(c);
    if (next == 0) return;
    for (int peer = 0; peer < c.config.num_ranks; ++peer) *resumed_at(c, c.rank, peer) = 0;
    count_call(c, next - 2);
    for (auto& first : c.state->first_calls) first = next - 1;
    for (auto& verdicts : c.state->verdicts)
        for (auto& verdict : verdicts) verdict = 0;
    c.state->masks = 0;
    *static_cast<volatile unsigned*>(c.seen_masks) = 0;
}

// Tell a rank that it is taken back. Over nodes this rank tells the rank of its rail in this node.
__device__ void take_back(const LowLatencyContext& c, int rank) {
    const unsigned long long next = next_call(c);
    for (unsigned rest = masked_with(c, rank); rest != 0; rest &= rest - 1) c.state->first_calls[__ffs(rest) - 1] = next;
    set_mask(c, rank, false);
    const int to = is_in_node(c, rank) ? rank : static_cast<int>(c.first_rank + rank % c.ranks_per_node);
    store_release(resumed_at(c, to, c.rank), next + 1);
}

// Catch up before the call after a refused one: wait, as a receiver would, until all ranks have entered the call before last.
__device__ void catch_up(const LowLatencyContext& c) {
    const unsigned long long call = next_call(c);
    if (call <= kMaxInFlight) return;
    const Turn turn(c, c.rank, call - kMaxInFlight);
    for (int peer = 0; peer < c.config.num_ranks; ++peer)
        if (peer != c.rank && is_in_node(c, peer) && takes_part(c, peer, call - kMaxInFlight))
            wait_word_of(c, turn.entered(peer), call - kMaxInFlight, peer, GpuPhase::kEntry, c.timeout_ns);
}

__device__ void refuse(const LowLatencyControlParams& p) {
    const LowLatencyContext& c = p.context;
    const unsigned long long call = next_call(c);
    LowLatencyWhat what{};
    what.is_refused = true;
    for (int to = 0; to < c.config.num_ranks; ++to) {
        if (to == c.rank || is_masked(c, to) || !is_in_node(c, to)) continue;
        LowLatencyReason* reason = reason_at(c, to, c.rank, call);
        for (int i = 0; i < static_cast<int>(sizeof(reason->text)); ++i) reason->text[i] = p.reason[i];
        __threadfence_system();  // the reason must be visible before the words below, any of which a peer may read
        const Turn there(c, to, call);
        store_relaxed(there.entered(c.rank), what.flag(call, 0));
        for (int expert = 0; expert < c.config.num_local_experts; ++expert)
            store_relaxed(there.counts(c.rank) + expert, what.flag(call, 0));
    }
    count_call(c, call);
}

__global__ void low_latency_control(const __grid_constant__ LowLatencyControlParams p) {
    wait_for_kernel_before();
    const LowLatencyContext& c = p.context;
    if (p.action == LowLatencyControlParams::kUnmask && is_over_nodes(c) && gave_up(c)) return;  // the rank has not come back
    if (p.action == LowLatencyControlParams::kUnmask) forget(c, p.rank);
    if (p.action == LowLatencyControlParams::kRejoin) forget(c, c.rank);
    if (threadIdx.x != 0) return;
    switch (p.action) {
        case LowLatencyControlParams::kMask: return set_mask(c, p.rank, true);
        case LowLatencyControlParams::kUnmask: return take_back(c, p.rank);
        case LowLatencyControlParams::kTellReturned: return;  // done over the network, by nvshmem/low_latency_control.cu
        case LowLatencyControlParams::kRejoin: return rejoin(c);
        case LowLatencyControlParams::kRefuse: return refuse(p);
        case LowLatencyControlParams::kCatchUp: return catch_up(c);
    }
}

}  // namespace

void launch_low_latency_control(const LowLatencyControlParams& p, void* stream) {
    launch<low_latency_control>("low_latency_control", 1, kThreads, 0, p, stream);
}

}  // namespace deepep_moe

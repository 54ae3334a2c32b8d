// Reads words and rows that have crossed between nodes, for the ranks of the receiving node. Only the rank whose memory the network card
// writes polls these words, because only that rank's GPU is sure to see the card's writes in their order. It sets flags at the other ranks,
// which then read the rows where they lie.
#pragma once

#include "cuda/device/low_latency.cuh"
#include "cuda/low_latency_rail.h"

namespace deepep_moe {

// RailCall::wait says what it does. It is not inlined, so that a kernel that waits in several places has the code once.
__device__ __noinline__ inline unsigned long long wait_network_word(const LowLatencyContext& c, const unsigned long long* word,
                                                                    unsigned long long call, int source, GpuPhase phase,
                                                                    unsigned long long timeout_ns) {
    const auto load = [](const unsigned long long* from) { return load_acquire(from); };
    unsigned long long seen = load_acquire(word);
    if (seen >> kWhatBits >= call) return seen;
    if (!takes_part(c, source, call)) return 0;
    seen = watch_word<kPauseNs, kLooks>(c, word, load, call << kWhatBits, source, timeout_ns);
    if (seen >> kWhatBits >= call) return seen;
    mask_or_report(c, source, phase, call, seen);
    return 0;
}

__device__ __forceinline__ bool has_lost(const LowLatencyContext& c, int source) {
    const volatile GpuFailure* const failure = c.failure;
    return gave_up(c) && failure->peer == source && failure->kind >= kTimeout && failure->kind <= kPeerEnded;
}

template <class Look>
__device__ __forceinline__ unsigned long long look_to_tell(const LowLatencyContext& c, const Look& look, unsigned long long call,
                                                           int source, GpuPhase phase, unsigned long long timeout_ns) {
    const unsigned long long deadline = now_ns() + timeout_ns;
    unsigned long long seen = look();
    if (!takes_part(c, source, call)) return seen >> kWhatBits == call ? seen : 0;  // a later word does not count: it may repeat that call
#pragma unroll 1
    for (unsigned round = 1; seen >> kWhatBits < call && !is_masked(c, source); ++round) {
        pause_ns(kPauseNs);
        seen = look();
        if (round % kLooks != 0 || seen >> kWhatBits >= call) continue;
        if (has_lost(c, source) || now_ns() >= deadline) break;
    }
    if (seen >> kWhatBits >= call) return seen;
    mask_or_report(c, source, phase, call, seen);
    return 0;
}

__device__ __noinline__ inline unsigned long long wait_network_word_to_tell(const LowLatencyContext& c, const unsigned long long* word,
                                                                            unsigned long long call, int source, GpuPhase phase,
                                                                            unsigned long long timeout_ns) {
    return look_to_tell(c, [word] { return load_acquire(word); }, call, source, phase, timeout_ns);
}

__device__ void tell_reason(const LowLatencyRailContext& r, unsigned long long call, int source, unsigned masks);

struct RailCall {
    const LowLatencyRailContext& r;
    const LowLatencyContext& c;
    const unsigned long long call;

    __device__ RailCall(const LowLatencyRailContext& r, unsigned long long call) : r(r), c(r.context), call(call) {}

    __device__ int first_rank() const { return r.node * r.ranks_per_node; }  // the first rank of this node
    __device__ int node_of(int rank) const { return rank / r.ranks_per_node; }
    __device__ bool is_outside(int rank) const { return node_of(rank) != r.node; }
    __device__ int rank_in(int node) const { return node * r.ranks_per_node + r.index; }     // the rank of this rail in `node`
    __device__ int node_at(int turn) const { return (r.node + turn) % r.num_nodes; }         // the next node first
    __device__ bool is_lost(int node) const { return !takes_part(c, rank_in(node), call); }  // then nothing is sent there
    __device__ int experts_of_node() const { return r.ranks_per_node * c.config.num_local_experts; }
    __device__ unsigned ranks_of(int node) const { return ((1u << r.ranks_per_node) - 1) << node * r.ranks_per_node; }

    // The next functions return memory that belongs to a rank outside. The network writes the first three words; only the rank of its rail
    // here may read them.
    __device__ unsigned long long* entered(int source) const {
        return at<unsigned long long>(source, r.layout.entered_of(call, node_of(source)));
    }
    __device__ unsigned long long* weighed(int source) const {
        return at<unsigned long long>(source, r.layout.weighed_of(call, node_of(source)));
    }
    __device__ unsigned long long* arrived(int source, int token) const {
        return at<unsigned long long>(source, r.layout.arrived_of(call, node_of(source), token));
    }
    __device__ const LowLatencyReason& reason(int source) const {
        return *at<LowLatencyReason>(source, r.layout.in_of(call, node_of(source)));
    }
    // Returns the number of tokens that `source` has for each expert of this node.
    __device__ const int32_t* counts(int source) const { return at<int32_t>(source, r.layout.in_of(call, node_of(source))); }
    __device__ const LowLatencyLane* lanes(int source, int token) const {
        return at<LowLatencyLane>(source, r.layout.in_of(call, node_of(source)) + r.layout.lanes) + token * c.config.num_topk;
    }
    __device__ const float* weights(int source, int token) const {
        return at<float>(source, r.layout.in_of(call, node_of(source)) + r.layout.weights) + token * c.config.num_topk;
    }
    __device__ const std::byte* row(int source, int token, int64_t row_bytes) const {
        return at<std::byte>(source, r.layout.inbox + r.layout.box_of(call, r.node, node_of(source))) + token * row_bytes;
    }

    // Wait for a word of the network until it is of this call. Return 0 if its rank is masked or its failure reported. One thread calls it.
    __device__ unsigned long long wait(const unsigned long long* word, int source, GpuPhase phase, unsigned long long timeout_ns) const {
        return wait_network_word(c, word, call, source, phase, timeout_ns);
    }
    // Wait for a word that other ranks of this node depend on. The thread goes on after this rank has given up, unless this rank gave up on
    // the same source.
    __device__ unsigned long long wait_to_tell(const unsigned long long* word, int source, GpuPhase phase,
                                               unsigned long long timeout_ns) const {
        return wait_network_word_to_tell(c, word, call, source, phase, timeout_ns);
    }

    // Wait until the weights of a rank have come, or its entry says that it does something other than `flag`. One thread calls it.
    __device__ unsigned long long wait_weights_to_tell(int source, unsigned long long flag) const {
        const unsigned long long *const weighed = this->weighed(source), *const entered = this->entered(source);
        const auto look = [&] {
            const unsigned long long seen = load_acquire(weighed), entry = load_acquire(entered);
            const bool is_other = entry >> kWhatBits >= call && ((entry ^ flag) >> kValueBitsOfFlag) != 0;
            return seen >> kWhatBits < call && is_other ? entry : seen;
        };
        return look_to_tell(c, look, call, source, GpuPhase::kRailEntry, c.timeout_ns);
    }

    // Pass the entry of a rank of the rail on to the ranks of this node, with its reason if it refuses. One thread calls it.
    __device__ void tell_entered(int source, unsigned long long word) const {
        const unsigned masks = masks_of(c);
        if (LowLatencyWhat::unpacked(LowLatencyWhat::packed_in(word)).is_refused) tell_reason(r, call, source, masks);
        fence_system();  // whoever sees one of the words below sees what this thread has seen
#pragma unroll 1
        for (int to = first_rank(); to < first_rank() + r.ranks_per_node; ++to)
            if ((masks >> to & 1) == 0) store_relaxed(Turn(c, to, call).entered(source), word);
    }

private:
    template <class T>
    __device__ T* at(int source, int64_t offset) const {
        return reinterpret_cast<T*>(r.bases[source % r.ranks_per_node] + offset);
    }
};

// Copy the reason to the ranks of this node that are not masked, where their hosts look for it. One thread calls it.
__device__ __noinline__ inline void tell_reason(const LowLatencyRailContext& r, unsigned long long call, int source, unsigned masks) {
    const RailCall rail(r, call);
#pragma unroll 1
    for (int to = rail.first_rank(); to < rail.first_rank() + r.ranks_per_node; ++to)
        if ((masks >> to & 1) == 0) *reason_at(rail.c, to, source, call) = rail.reason(source);
}

// Each thread waits for a word of the rail and passes it on to the ranks of this node: entries, counts and rows. All threads of a warp wait
// for one rank, because they can only go on together.
struct Relay {
    static constexpr int kLanes = 32;
    const RailCall& rail;
    const LowLatencyDispatchParams& p;

    // There is one task for each possible word.
    __device__ static int num_tasks(const LowLatencyRailContext& r) {
        return (r.num_nodes - 1) * static_cast<int>(round_up(1 + r.context.config.num_max_tokens, kLanes));
    }

    // Run tasks first, first + step, ... The step is the number of all threads, a multiple of kLanes.
    __device__ void run(int first, int step) const {
        const unsigned long long flag = p.what.flag(rail.call, 0);
        const int num_peers = rail.r.num_nodes - 1;
#pragma unroll 1
        for (int task = first; task < num_tasks(rail.r); task += step) {
            const int turn = task / kLanes % num_peers, nth = task / kLanes / num_peers * kLanes + task % kLanes, token = nth - 1;
            const int source = rail.rank_in(rail.node_at(1 + turn));
            const unsigned long long word = rail.wait_to_tell(rail.entered(source), source, GpuPhase::kRailEntry, rail.c.timeout_ns);
            const bool is_same = ((word ^ flag) >> kValueBitsOfFlag) == 0;
            if (word != 0 && token < 0) rail.tell_entered(source, word);
            if (is_same) tell_counts(source, flag, nth);
            if (is_same && token >= 0 && token < LowLatencyWhat::value_in(word)) tell_row(source, token, flag);
            if (word == 0 && gave_up(rail.c)) fail();
        }
    }

private:
    // Mark the handle as failed: it does not say which ranks have which rows, so no combine may use it.
    __device__ void fail() const {
        *reinterpret_cast<unsigned long long*>(p.handle + LowLatencyHandleLayout(rail.c.config).failed) = rail.call ^ rail.c.failed;
    }

    // Pass on the nth thread's part of the counts from `source`. Not called for a refusal or another call; `entered` then ends all waits.
    __device__ void tell_counts(int source, unsigned long long flag, int nth) const {
        const int num_local = rail.c.config.num_local_experts, step = num_tasks(rail.r) / (rail.r.num_nodes - 1);
        const unsigned masks = masks_of(rail.c);
#pragma unroll 1
        for (int expert = nth; expert < rail.experts_of_node(); expert += step) {
            const int to = rail.first_rank() + expert / num_local;
            if ((masks >> to & 1) == 0)
                store_relaxed(Turn(rail.c, to, rail.call).counts(source) + expert % num_local, flag + rail.counts(source)[expert]);
        }
    }

    // Store in the handle which ranks of this node get the row, because this rank will add up their results; then set those ranks' flags.
    __device__ void tell_row(int source, int token, unsigned long long flag) const {
        const LowLatencyConfig& config = rail.c.config;
        const LowLatencyLane* const lanes = rail.lanes(source, token);
        unsigned ranks = 0;
#pragma unroll 4
        for (int k = 0; k < config.num_topk; ++k)
            if (lanes[k].expert >= 0) ranks |= 1u << lanes[k].expert / config.num_local_experts;
        in_handle<unsigned>(
            p, LowLatencyRailHandle(config, rail.r.num_nodes).in_ranks)[rail.node_of(source) * config.num_max_tokens + token] = ranks;
        if (ranks == 0) return;
        const unsigned long long word = rail.wait_to_tell(rail.arrived(source, token), source, GpuPhase::kRailRows, rail.c.timeout_ns);
        if (word >> kWhatBits > rail.call) report_what(rail.c, flag, word, source);
        if (word >> kWhatBits != rail.call && gave_up(rail.c)) fail();
        if (word >> kWhatBits != rail.call) return;
        const unsigned masks = masks_of(rail.c);
        fence_system();
#pragma unroll 1
        for (unsigned rest = ranks & ~(masks >> rail.first_rank()); rest != 0; rest &= rest - 1)
            store_relaxed(Turn(rail.c, rail.first_rank() + __ffs(rest) - 1, rail.call).landed(source, token), flag);
    }
};

// Gives the words by which ranks of all nodes enter a call, as WorkspaceWords does for one node. The word of a rank outside announces lanes
// that lie in the memory of its rail's rank here.
struct RailWords {
    const RailCall rail;
    __device__ const unsigned long long* entered(int source) const { return Turn(rail.c, rail.c.rank, rail.call).entered(source); }
    __device__ static unsigned long long look(const unsigned long long* word) { return load_acquire(word); }
    __device__ unsigned long long wait(const unsigned long long* word, int source) const {
        return rail.wait(word, source, GpuPhase::kEntry, rail.c.timeout_ns);
    }
};

// Returns the timeout for a rank that may itself first wait for one of its own node.
__device__ __forceinline__ unsigned long long behind_node_ns(const LowLatencyContext& c) { return 2 * c.timeout_ns; }

// Returns the bytes of a row between nodes; an fp8 row is followed by its scales.
__device__ __forceinline__ int64_t rail_row_bytes(const LowLatencyConfig& config, int64_t row_bytes, bool has_scales) {
    return has_scales ? round_up(config.hidden + 4 * (config.hidden / kScaleBlock), 16) : row_bytes;
}

}  // namespace deepep_moe

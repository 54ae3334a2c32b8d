// The low-latency kernels share this: addresses in a turn, waits for ranks that may be masked, the end of a call.
#pragma once

#include "cuda/low_latency.h"
#include "cuda/device/wait.cuh"

namespace deepep_moe {

using tuning::kLowLatencyPauseNs;
constexpr int kLooks = tuning::kLowLatencyLooks;

// Gives the addresses of a call's arrays in the workspace of `owner`.
struct Turn {
    __device__ Turn(const LowLatencyContext& c, int owner, unsigned long long call)
        : c(c), base(c.workspaces[owner] + c.layout.turns + static_cast<int64_t>(call % kTurns) * c.layout.turn_bytes) {}
    __device__ unsigned long long* entered(int source) const { return at<unsigned long long>(c.layout.entered, source); }
    __device__ unsigned long long* counts(int source) const {
        return at<unsigned long long>(c.layout.counts, source * c.config.num_local_experts);
    }
    __device__ uint4* head(int source, int token) const {
        return at<uint4>(c.layout.rows + slot_index(source, token) * c.layout.slot_bytes, 0);
    }
    __device__ uint4* row(int source, int token) const { return head(source, token) + c.layout.head_bytes / 16; }
    __device__ unsigned long long* landed(int source, int token) const {
        return at<unsigned long long>(c.layout.landed, slot_index(source, token));
    }

private:
    __device__ int64_t slot_index(int source, int token) const { return source * c.config.num_max_tokens + token; }
    template <class T>
    __device__ T* at(int64_t offset, int64_t index) const {
        return reinterpret_cast<T*>(base + offset) + index;
    }
    const LowLatencyContext& c;
    std::byte* const base;
};

// Returns what lies at an offset of a handle (LowLatencyHandleLayout). A dispatch writes it, a combine only reads.
template <class T>
__device__ __forceinline__ T* in_handle(const LowLatencyDispatchParams& p, int64_t offset) {
    return reinterpret_cast<T*>(p.handle + offset);
}
template <class T>
__device__ __forceinline__ const T* in_handle(const LowLatencyCombineParams& p, int64_t offset) {
    return reinterpret_cast<const T*>(p.handle + offset);
}

// Returns the number of the dispatch whose handle a combine uses, and whether that dispatch has failed.
__device__ __forceinline__ unsigned long long dispatch_of(const LowLatencyCombineParams& p) { return *in_handle<unsigned long long>(p, 0); }
__device__ __forceinline__ bool has_failed(const LowLatencyContext& c, const LowLatencyCombineParams& p) {
    return *in_handle<unsigned long long>(p, LowLatencyHandleLayout(c.config).failed) == (dispatch_of(p) ^ c.failed);
}

// Returns where `source` writes its reason for refusing `call`, in the workspace of `owner`.
__device__ __forceinline__ LowLatencyReason* reason_at(const LowLatencyContext& c, int owner, int source, unsigned long long call) {
    return reinterpret_cast<LowLatencyReason*>(c.workspaces[owner] + c.layout.reason_of(source, call));
}

// Returns the word in which `source` writes its next call plus 1 when it takes a rank back. Over nodes the rank of its rail in this node
// writes it.
__device__ __forceinline__ unsigned long long* resumed_at(const LowLatencyContext& c, int owner, int source) {
    return reinterpret_cast<unsigned long long*>(c.workspaces[owner] + c.layout.resumed_of(source));
}

__device__ __forceinline__ unsigned masks_of(const LowLatencyContext& c) { return *static_cast<volatile unsigned*>(&c.state->masks); }
__device__ __forceinline__ bool is_masked(const LowLatencyContext& c, int rank) { return masks_of(c) >> rank & 1; }

// Returns whether `rank` takes part in the call.
__device__ __forceinline__ bool takes_part(const LowLatencyContext& c, int rank, unsigned long long call) {
    const unsigned long long first_call = c.state->first_calls[rank];  // loaded at once, in parallel with the masks
    return !is_masked(c, rank) & (call >= first_call);
}

// Ranks outside this node are reached only through the ranks of their rail.
__device__ __forceinline__ bool is_in_node(const LowLatencyContext& c, int rank) { return rank - c.first_rank < c.ranks_per_node; }

__device__ __forceinline__ unsigned ranks_of_node(const LowLatencyContext& c) { return ((1u << c.ranks_per_node) - 1) << c.first_rank; }

// Returns the ranks to mask with `rank`. For a rank of this node that is its whole rail, because their rows come through its memory.
__device__ __forceinline__ unsigned masked_with(const LowLatencyContext& c, int rank) {
    return is_in_node(c, rank) ? c.rail << (rank - c.first_rank) : 1u << rank;
}

__device__ __noinline__ inline void set_mask(const LowLatencyContext& c, int rank, bool masked) {
    const unsigned bits = masked_with(c, rank);
    unsigned written, masks = masked ? atomicOr(&c.state->masks, bits) | bits : atomicAnd(&c.state->masks, ~bits) & ~bits;
    do {  // other threads may change masks now; the last one to write for the host must write all of them
        written = masks;
        *static_cast<volatile unsigned*>(c.seen_masks) = written;
        __threadfence_system();
        masks = masks_of(c);
    } while (masks != written);
}

// Mask or report `source`, which does not deliver and whose flag is `seen`, unless the wait ended because of another failure.
__device__ __noinline__ inline void mask_or_report(const LowLatencyContext& c, int source, GpuPhase phase, unsigned long long call,
                                                   unsigned long long seen) {
    if (gave_up(c) || is_masked(c, source)) return;
    if (c.masks_stalled && source != c.rank)
        set_mask(c, source, true);
    else
        report_lack(c, source, phase, call, seen >> kWhatBits);
}

// Rare paths are not inlined. A kernel of microseconds starts with a cold instruction cache, so code that it does not need must not lie
// between code that it needs.

// Mark the handle of a failed dispatch: rows that a block has not received have no place in it, so no combine may use it.
__device__ __noinline__ inline void fail_handle(const LowLatencyContext& c, std::byte* handle, unsigned long long call) {
    *reinterpret_cast<unsigned long long*>(handle + LowLatencyHandleLayout(c.config).failed) = call ^ c.failed;
}

// Write to a rank why this one refuses. The rank reads it once it has seen the flag that follows. One thread calls it.
__device__ __noinline__ inline void tell_reason(const LowLatencyContext& c, int to, unsigned long long call, const GpuFailure& why) {
    LowLatencyReason* const reason = reason_at(c, to, c.rank, call);
    reason->why = why;
    reason->text[0] = '\0';
    __threadfence_system();
}

// Wait for a word of `source` that carries its own value, until it is of this call. Return 0 if the source is masked, before or now, or
// the failure is reported.
__device__ __noinline__ inline unsigned long long wait_word_of(const LowLatencyContext& c, const unsigned long long* word,
                                                               unsigned long long call, int source, GpuPhase phase,
                                                               unsigned long long timeout_ns) {
    const unsigned long long expected = call << kWhatBits;
    unsigned long long seen = load_relaxed(word);
    if (seen >= expected) return seen;
    if (!takes_part(c, source, call)) return 0;
    seen = watch_word<kLowLatencyPauseNs, kLooks>(
        c, word, [](const unsigned long long* from) { return load_relaxed(from); }, expected, source, timeout_ns);
    if (seen >= expected) return seen;
    mask_or_report(c, source, phase, call, seen);
    return 0;
}

// Wait for a word of the call that another block of this rank has already seen.
__device__ __forceinline__ unsigned long long seen_elsewhere(const unsigned long long* word, unsigned long long call) {
    unsigned long long seen = load_relaxed(word);
    while (seen >> kWhatBits < call) seen = load_relaxed(word);
    return seen;
}

// Report a flag of another call: the peer called something else, refused its arguments, or gave up waiting and went on to a later call.
__device__ __noinline__ inline void report_what(const LowLatencyContext& c, unsigned long long flag, unsigned long long word, int source) {
    const unsigned expected = LowLatencyWhat::packed_in(flag), seen = LowLatencyWhat::packed_in(word);
    const unsigned long long call = flag >> kWhatBits, last = word >> kWhatBits;
    if (last != call)
        report(c, kOvertaken, source, GpuPhase::kEntry, static_cast<long long>(call), static_cast<long long>(last));
    else if (seen == LowLatencyWhat::kAbsent)
        mask_or_report(c, source, GpuPhase::kEntry, call, 0);
    else if (LowLatencyWhat::unpacked(seen).is_refused)
        report(c, kPeerRefused, source, GpuPhase::kEntry, static_cast<long long>(call), 0);
    else
        report(c, kMismatch, source, GpuPhase::kEntry, expected, seen);
}

// Returns whether `source` does the same as this rank. Here and below, `flag` is this rank's flag of the call, with value 0.
__device__ __forceinline__ bool check_what(const LowLatencyContext& c, unsigned long long flag, unsigned long long word, int source) {
    const bool is_same = ((word ^ flag) >> kValueBitsOfFlag) == 0;
    if (!is_same) report_what(c, flag, word, source);
    return is_same;
}

// Returns whether `source` has come to the call. The first block of this rank to ask decides for all.
__device__ __noinline__ inline bool agree(const LowLatencyContext& c, unsigned long long call, int source, bool came) {
    unsigned long long* const verdict = &c.state->verdicts[call % kTurns][source];
    const unsigned long long own_verdict = 2 * call + came;
    unsigned long long seen = load_relaxed(verdict);
    while (seen / 2 < call) {
        const unsigned long long before = atomicCAS(verdict, seen, own_verdict);
        if (before == seen) return came;
        seen = before;
    }
    return seen % 2 != 0;
}

// Gives the words in this rank's workspace by which ranks enter a call. Each carries its own value.
struct WorkspaceWords {
    const LowLatencyContext& c;
    const unsigned long long call;
    __device__ const unsigned long long* entered(int source) const { return Turn(c, c.rank, call).entered(source); }
    __device__ static unsigned long long look(const unsigned long long* word) { return load_relaxed(word); }
    // For a rank outside, a rank of this node writes the word; it may itself have waited for the timeout, so wait twice as long.
    __device__ unsigned long long wait(const unsigned long long* word, int source) const {
        return wait_word_of(c, word, call, source, GpuPhase::kEntry, is_in_node(c, source) ? c.timeout_ns : 2 * c.timeout_ns);
    }
};

// Holds the result of `meet`: a bit mask of the ranks that have come, and in thread r the number of tokens of rank r.
struct Sources {
    unsigned came;
    int num_tokens;
};

// Wait until all ranks, or those in `among`, have entered the call, as this block sees it. One block `counts` the waits. One warp calls it.
template <class Words>
__device__ Sources meet(const LowLatencyContext& c, Words words, unsigned long long flag, int64_t* statistics, bool counts,
                        unsigned among = kFullWarp) {
    const unsigned long long call = flag >> kWhatBits;
    const int source = threadIdx.x % 32;
    unsigned long long word = 0;
    bool came = false;
    if (source < c.config.num_ranks && (among >> source & 1) != 0) {
        const unsigned long long start = counts ? now_ns() : 0;
        const unsigned long long* const entered = words.entered(source);
        word = words.look(entered);
        const bool is_expected = takes_part(c, source, call);
        if (word >> kWhatBits < call) word = words.wait(entered, source);
        if (!is_expected) word = 0;
        if (counts)
            atomicAdd(reinterpret_cast<unsigned long long*>(LowLatencyStatistics(c.config, statistics).wait_ns) + source, now_ns() - start);
        came = word != 0 && check_what(c, flag, word, source);
    }
    return {__ballot_sync(kFullWarp, came), came ? LowLatencyWhat::value_in(word) : 0};
}

// If ranks may be masked meanwhile, replace what this block has found by what all blocks of this rank agree on. One warp calls it.
template <class Words>
__device__ __noinline__ Sources agreed(const LowLatencyContext& c, Words words, unsigned long long flag, Sources sources) {
    const unsigned long long call = flag >> kWhatBits;
    const int source = threadIdx.x % 32;
    const bool has_come = (sources.came >> source & 1) != 0, came = source < c.config.num_ranks && agree(c, call, source, has_come);
    if (came && !has_come) {
        seen_elsewhere(words.entered(source), call);
        sources.num_tokens = LowLatencyWhat::value_in(words.look(words.entered(source)));
    }
    return {__ballot_sync(kFullWarp, came), came ? sources.num_tokens : 0};
}

// The number of the call that is sent now. Each block counts it for itself, so that none has to wait for the others.
__device__ __forceinline__ unsigned long long next_call(const LowLatencyContext& c) { return c.state->num_sent[blockIdx.x] + 1; }

// Count the call for all blocks. One thread calls it.
__device__ inline void count_call(const LowLatencyContext& c, unsigned long long call) {
#pragma unroll 1
    for (int block = 0; block < kLowLatencyMaxBlocks; ++block) c.state->num_sent[block] = call;
}

// All threads of all blocks call it at the end of a sending kernel.
__device__ inline void end_send(const LowLatencyContext& c, unsigned long long call) {
    __syncthreads();
    if (threadIdx.x == 0) c.state->num_sent[blockIdx.x] = call;
    if (blockIdx.x == gridDim.x - 1) {
#pragma unroll 1
        for (int block = gridDim.x + threadIdx.x; block < kLowLatencyMaxBlocks; block += blockDim.x) c.state->num_sent[block] = call;
    }
}

// Names a token of a rank.
struct SourceToken {
    int source, token;
};

}  // namespace deepep_moe

// Computes where the rows of a low-latency dispatch belong. A source counts its earlier tokens of the same expert. A receiver adds the
// tokens of that expert from the sources before.
#pragma once

#include "cuda/device/low_latency.cuh"

namespace deepep_moe {

__device__ __forceinline__ int64_t expert_at(const LowLatencyDispatchParams& p, int64_t i) {
    return p.is_int64 ? static_cast<const int64_t*>(p.topk_idx)[i] : static_cast<const int32_t*>(p.topk_idx)[i];
}

// The bit matrix [expert][token of the caller] in shared memory says which tokens go to which expert.
struct Marks {
    uint32_t* const all;
    const int lanes, words;  // words of an expert
    __device__ Marks(void* all, int num_tokens, int lanes)
        : all(static_cast<uint32_t*>(all)), lanes(lanes), words((num_tokens / lanes + 31) / 32) {}
    __device__ uint32_t* of(int64_t expert) const { return all + expert * words; }
    // Returns the caller's token that a token belongs to.
    __device__ int number(int token) const { return lanes == 1 ? token : token / lanes; }
    __device__ int count(int expert) const { return count(expert, words); }
    __device__ int before(int token, int expert) const {
        token = number(token);
        return count(expert, token / 32) + __popc(of(expert)[token / 32] & ((1u << token % 32) - 1));
    }

private:
    __device__ int count(int expert, int num_words) const {
        int count = 0;
#pragma unroll 1
        for (int i = 0; i < num_words; ++i) count += __popc(of(expert)[i]);
        return count;
    }
};

// Returns the block's place for the first fault in topk_idx: `peer` is the top-k entry, `expected` the token, `seen` the value.
__device__ __forceinline__ GpuFailure& refusal() {
    __shared__ GpuFailure fault;
    return fault;
}

// Clear the marks. All threads of a block call it, and synchronize before they mark.
__device__ __forceinline__ void clear(const LowLatencyContext& c, const Marks& marks) {
    if (threadIdx.x == 0) refusal() = {};
#pragma unroll 1
    for (int i = threadIdx.x; i < c.config.num_experts * marks.words; i += blockDim.x) marks.of(0)[i] = 0;
}

// Loads the first entries of topk_idx that each thread will mark, early, to hide the latency.
struct FirstMarks {
    static constexpr int kCount = 2;
    int64_t experts[kCount];
    __device__ FirstMarks(const LowLatencyContext& c, const LowLatencyDispatchParams& p) {
#pragma unroll
        for (int n = 0; n < kCount; ++n) {
            const int i = threadIdx.x + n * blockDim.x;
            experts[n] = i < p.num_tokens * c.config.num_topk ? expert_at(p, i) : -1;
        }
    }
};

__device__ __forceinline__ void mark(const LowLatencyContext& c, const Marks& marks, int i, int64_t expert) {
    if (expert == -1) return;
    const int entry = i / c.config.num_topk, token = marks.number(entry);
    const bool inside = 0 <= expert && expert < c.config.num_experts;
    const uint32_t bit = 1u << token % 32;
    if (inside && (atomicOr(marks.of(expert) + token / 32, bit) & bit) == 0) return;
    const GpuFailureKind kind = inside ? kDuplicateExpert : kIndexOutOfRange;
    const int lane = marks.lanes == 1 ? i - entry * c.config.num_topk : entry % marks.lanes;
    if (atomicCAS(&refusal().kind, 0, static_cast<int>(kind)) == 0)
        refusal() = {kind, lane, static_cast<int>(GpuPhase::kEntry), token, expert};
    report(c, kind, lane, GpuPhase::kEntry, token, expert);
}

// Mark this rank's tokens. Returns false, with the fault reported, if topk_idx has one; such an entry does not count. All threads call it.
__device__ __forceinline__ bool mark_tokens(const LowLatencyContext& c, const LowLatencyDispatchParams& p, const Marks& marks,
                                            const FirstMarks& first) {
    const int num_lanes = p.num_tokens * c.config.num_topk, step = static_cast<int>(blockDim.x);
#pragma unroll
    for (int n = 0; n < first.kCount; ++n) mark(c, marks, threadIdx.x + n * step, first.experts[n]);
#pragma unroll 1
    for (int i = threadIdx.x + first.kCount * step; i < num_lanes; i += step) mark(c, marks, i, expert_at(p, i));
    __syncthreads();
    return refusal().kind == kNoFailure;
}

// Read [num_ranks][num_local_experts] token counts into shared memory; each of `step` threads reads its part, from `first` on. The counts
// of a rank are 0 if it is masked or its failure is reported; return the bits of those ranks.
__device__ __forceinline__ unsigned wait_counts(const LowLatencyContext& c, unsigned long long flag, int* counts, int first, int step) {
    const unsigned long long call = flag >> kWhatBits, *const words = Turn(c, c.rank, call).counts(0);
    unsigned lacking = 0;
#pragma unroll 1
    for (int i = first; i < c.config.num_experts; i += step) {
        unsigned long long word = load_relaxed(words + i);
        if (((word ^ flag) >> kValueBitsOfFlag) != 0) {
            const int source = i / c.config.num_local_experts;
            word = is_masked(c, source) ? 0 : wait_word_of(c, words + i, call, source, GpuPhase::kEntry, c.timeout_ns);
            if (word != 0 && !check_what(c, flag, word, source)) word = 0;
            if (word == 0) lacking |= 1u << source;
        }
        counts[i] = LowLatencyWhat::value_in(word);
    }
    return lacking;
}

// Read the counts of `sources` again, once other blocks of this rank have seen them. All threads of a block call it.
__device__ __noinline__ inline void read_counts_again(const LowLatencyContext& c, unsigned long long flag, int* counts, unsigned sources) {
    const unsigned long long call = flag >> kWhatBits, *const words = Turn(c, c.rank, call).counts(0);
#pragma unroll 1
    for (int i = threadIdx.x; i < c.config.num_experts; i += blockDim.x)
        if ((sources >> i / c.config.num_local_experts & 1) != 0) counts[i] = LowLatencyWhat::value_in(seen_elsewhere(words + i, call));
}

// Returns the number of tokens that the ranks of `came` before `source` have for a local expert.
__device__ __forceinline__ int tokens_before(const LowLatencyContext& c, const int* counts, unsigned came, int source, int expert) {
    int count = 0;
#pragma unroll 1
    for (int before = 0; before < source; ++before)
        if ((came >> before & 1) != 0) count += counts[before * c.config.num_local_experts + expert];
    return count;
}

}  // namespace deepep_moe

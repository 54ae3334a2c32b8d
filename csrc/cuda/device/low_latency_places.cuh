// Where the rows of a low-latency dispatch belong: a source finds each token's place among its own of the same expert, a receiver how many
// tokens the sources before have for the expert.
#pragma once

#include "cuda/device/low_latency.cuh"

namespace deepep_moe {

__device__ __forceinline__ int64_t expert_at(const LowLatencyDispatchParams& p, int64_t i) {
    return p.is_int64 ? static_cast<const int64_t*>(p.topk_idx)[i] : static_cast<const int32_t*>(p.topk_idx)[i];
}

// In shared memory, a bit for each expert and token: which tokens go to which expert.
struct Marks {
    uint32_t* const all;
    const int words;  // of an expert
    __device__ Marks(void* all, int num_tokens) : all(static_cast<uint32_t*>(all)), words((num_tokens + 31) / 32) {}
    __device__ uint32_t* of(int64_t expert) const { return all + expert * words; }
    __device__ int count(int expert) const { return count(expert, words); }
    __device__ int before(int token, int expert) const { return count(expert, token / 32) + __popc(of(expert)[token / 32] & ((1u << token % 32) - 1)); }

private:
    __device__ int count(int expert, int num_words) const {
        int count = 0;
#pragma unroll 1
        for (int i = 0; i < num_words; ++i) count += __popc(of(expert)[i]);
        return count;
    }
};

// What a block has found wrong with topk_idx first: kind, the lane as peer, the token as expected, the value as seen.
__device__ __forceinline__ GpuFailure& refusal() {
    __shared__ GpuFailure found;
    return found;
}

// Which each thread marks first.
__device__ __forceinline__ int64_t first_expert(const LowLatencyContext& c, const LowLatencyDispatchParams& p) {
    return static_cast<int>(threadIdx.x) < p.num_tokens * c.config.num_topk ? expert_at(p, threadIdx.x) : -1;
}

// All threads of a block; expert: the first of each. False: something is wrong with topk_idx, which is reported, and does not count.
__device__ __noinline__ inline bool mark_tokens(const LowLatencyContext& c, const LowLatencyDispatchParams& p, const Marks& marks, int64_t expert) {
    const int num_topk = c.config.num_topk, num_lanes = p.num_tokens * num_topk, step = static_cast<int>(blockDim.x);
    if (threadIdx.x == 0) refusal() = {};
#pragma unroll 1
    for (int i = threadIdx.x; i < c.config.num_experts * marks.words; i += step) marks.of(0)[i] = 0;
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < num_lanes; i += step) {
        const int64_t next = i + step < num_lanes ? expert_at(p, i + step) : -1;
        const int token = i / num_topk;
        const bool inside = 0 <= expert && expert < c.config.num_experts;
        const uint32_t bit = 1u << token % 32;
        if (expert != -1 && (!inside || (atomicOr(marks.of(expert) + token / 32, bit) & bit) != 0)) {
            const GpuFailureKind kind = inside ? kDuplicateExpert : kIndexOutOfRange;
            if (atomicCAS(&refusal().kind, 0, static_cast<int>(kind)) == 0) refusal() = {kind, i % num_topk, static_cast<int>(GpuPhase::kEntry), token, expert};
            report(c, kind, i % num_topk, GpuPhase::kEntry, token, expert);
        }
        expert = next;
    }
    __syncthreads();
    return refusal().kind == kNoFailure;
}

// How many tokens each rank has for each local expert, [num_ranks][num_local_experts] in shared memory: those that a thread finds, of `step`
// threads. 0 where a rank is masked, or the failure is reported.
__device__ __forceinline__ void hear_counts(const LowLatencyContext& c, unsigned long long flag, int* counts, int first, int step) {
    const unsigned long long call = flag >> kWhatBits, * const words = Turn(c, c.rank, call).counts(0);
#pragma unroll 1
    for (int i = first; i < c.config.num_experts; i += step) {
        unsigned long long word = load_relaxed(words + i);
        if (((word ^ flag) >> kValueBitsOfFlag) != 0) {
            const int source = i / c.config.num_local_experts;
            word = wait_word_of(c, words + i, call, source, GpuPhase::kEntry);
            if (word != 0 && !check_what(c, flag, word, source)) word = 0;
        }
        counts[i] = LowLatencyWhat::value_in(word);
    }
}

// How many tokens the ranks of `came` before `source` have for a local expert.
__device__ __forceinline__ int tokens_before(const LowLatencyContext& c, const int* counts, unsigned came, int source, int expert) {
    int count = 0;
#pragma unroll 1
    for (int before = 0; before < source; ++before)
        if ((came >> before & 1) != 0) count += counts[before * c.config.num_local_experts + expert];
    return count;
}

}  // namespace deepep_moe

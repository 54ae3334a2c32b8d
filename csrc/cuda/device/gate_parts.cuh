// The warps of a gate (csrc/cuda/gate.cu) share this. Its rare paths are not inlined, and take no address of a variable in registers, as
// that would move the variable to memory.
#pragma once

#include "cuda/device/scores.cuh"

namespace deepep_moe {
namespace {

constexpr int kWarps = 16, kThreads = 32 * kWarps;
constexpr int kMaxQuads = 8, kMaxShare = kMaxQuads * kQuad;  // quads and experts of a thread

constexpr int blocks_per_sm(int quads) { return quads <= 2 ? 2 : 1; }  // limited by the registers of a thread

// The sizes follow from the options, and are the same for all warps.
struct Sizes {
    int share;                // experts of a thread, at most
    int set_size, set_shift;  // neighbouring experts that 2^set_shift threads own together: a group, or all
    bool sets_are_groups;     // otherwise groups are searched in shared memory, by `search_lanes` threads each
    int search_lanes, search_share;
    bool is_full;                    // every thread owns as many experts as fit
    int num_counts;                  // experts and ranks
    int count_words, words_of_warp;  // shared memory, in words
    bool is_aligned;                 // logits, bias and shares can be accessed in quads
};

struct Launch {
    GpuGateParams params;
    Sizes sizes;
};

// Returns the index of a thread's number `at` in shared memory, which is [kQuads, 32, kQuad].
__device__ __forceinline__ unsigned place_of(unsigned lane, unsigned at) { return (32 * (at / kQuad) + lane) * kQuad + at % kQuad; }

// Holds the best two of a thread's experts. Key 0 means that there is none.
struct BestTwo {
    uint32_t best = 0, second = 0;
    unsigned best_at = 0, second_at = 0;  // positions in the thread's share

    __device__ __forceinline__ void add(uint32_t key, unsigned at) {
        const bool is_best = key > best, is_second = key > second;
        second_at = is_best ? best_at : is_second ? at : second_at;
        second = max(second, min(best, key));
        best_at = is_best ? at : best_at;
        best = max(best, key);
    }
};

// Returns false if a bias, or a logit that must be finite, is not finite. It reports the failure to the host. A finite logit and bias whose
// sum is infinite are accepted.
__device__ __noinline__ bool is_accepted(const Launch& launch, int64_t token) {
    const GateParams& p = launch.params.gate;
    const GateOptions& o = p.options;
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int first = 0; first < o.num_experts; first += 32) {
        const int expert = first + lane;
        const float logit = expert < o.num_experts ? load_number(p.logits, o.dtype, token * o.num_experts + expert) : 0.0f;
        const float bias = expert < o.num_experts && p.expert_bias != nullptr ? p.expert_bias[expert] : 0.0f;
        const bool is_wrong_logit = o.check_finite && !is_finite(logit);
        const unsigned faulty = __ballot_sync(kFullWarp, is_wrong_logit || !is_finite(bias));
        if (faulty == 0) continue;
        const float x = is_wrong_logit ? logit : bias;
        const GateFailure what = x != x ? GateFailure::kNan : x > 0.0f ? GateFailure::kInf : GateFailure::kMinusInf;
        const int whats = static_cast<int>(what) + (is_wrong_logit ? 0 : static_cast<int>(GateFailure::kBias));
        if (lane == __ffs(faulty) - 1)
            *static_cast<volatile unsigned long long*>(launch.params.failure) =
                static_cast<unsigned long long>(token) << kFailureTokenShift | static_cast<unsigned>(whats << kFailureWhatShift | expert);
        return false;
    }
    return true;
}

__device__ __noinline__ float score_of(float x, ScoreFunction function, double largest, double factor) {
    if (function == ScoreFunction::kSoftmax) return static_cast<float>(exp_of_shifted(x, largest) * factor);
    return function == ScoreFunction::kSqrtSoftplus ? static_cast<float>(sqrt_softplus_of(x)) : x;
}

// Each thread writes the shares of its experts, from their scores in shared memory.
__device__ __noinline__ void write_shares(const float* scores, const Launch& launch, int64_t token, int first, int num_own,
                                          bool is_routed) {
    const GateOptions& o = launch.params.gate.options;
    float* const row = launch.params.gate.shares + token * o.num_experts;
    if (!is_routed) return zero_any_row(row, 4 * o.num_experts);
    const int lane = threadIdx.x % 32;
    const bool is_logit = o.score_function == ScoreFunction::kSoftmaxTopk;
    float largest = -INFINITY;
#pragma unroll 1
    for (int i = 0; is_logit && i < num_own; ++i) largest = fmaxf(largest, scores[place_of(lane, i)]);
    largest = warp_max(largest);
    const auto part = [&](int i) {
        const float score = scores[place_of(lane, i)];
        return is_logit ? exp_of_shifted(score, largest) : score;
    };
    double sum = 0.0;
#pragma unroll 1
    for (int i = 0; i < num_own; ++i) sum += part(i);
    sum = warp_sum(sum) + (is_logit ? 0.0 : kWeightEpsilon);
    const double factor = o.score_function == ScoreFunction::kSoftmax ? 1.0 : reciprocal_of_sum(sum);
#pragma unroll 1
    for (int i = 0; i < num_own; i += kQuad) {
        float shares[kQuad];
#pragma unroll
        for (int j = 0; j < kQuad; ++j) shares[j] = static_cast<float>(part(i + j) * factor);
        if (launch.sizes.is_aligned) *pieces(row + first + i) = Piece<DType::kFloat32>::store(shares);
#pragma unroll
        for (int j = 0; j < kQuad; ++j)
            if (!launch.sizes.is_aligned && i + j < num_own) row[first + i + j] = shares[j];
    }
}

// ---- groups in shared memory: `search_lanes` threads search one group, 32 / search_lanes groups at a time ----

// Call f(expert, key) for a thread's share of a group.
template <class F>
__device__ __forceinline__ void for_members(uint32_t* keys, const Launch& launch, int group, int member, const F& f) {
    const Sizes& s = launch.sizes;
    const int group_size = launch.params.gate.options.num_experts / launch.params.gate.options.num_groups;
#pragma unroll 1
    for (int i = member * s.search_share; i < min((member + 1) * s.search_share, group_size); ++i) {
        const int expert = group * group_size + i;
        f(expert, keys[place_of(expert / s.share, expert % s.share)]);
    }
}

// Returns the sum of a group's best scores. Each round finds the best one that ranks behind the one before.
__device__ float score_of_group(uint32_t* keys, const Launch& launch, int group, int member) {
    unsigned long long bound = ~0ull;
    float sum = 0.0f;
#pragma unroll 1
    for (int n = 0; n < launch.params.gate.options.group_score_topk; ++n) {
        unsigned long long best = 0;  // the key, then the complement of the index: of equal keys the lower index wins
        for_members(keys, launch, group, member, [&](int expert, uint32_t& key) {
            const unsigned long long both = static_cast<unsigned long long>(key) << 32 | static_cast<uint32_t>(~expert);
            if (both < bound) best = max(best, both);
        });
#pragma unroll 1
        for (int step = 1; step < launch.sizes.search_lanes; step *= 2) best = max(best, __shfl_xor_sync(kFullWarp, best, step));
        const float next = from_ordered(static_cast<uint32_t>(best >> 32));
        sum = n == 0 ? next : __fadd_rn(sum, next);
        bound = best;
    }
    return sum;
}

// Exclude experts outside the best groups, if a thread owns experts of several groups, or more than two experts score a group.
__device__ __noinline__ void limit_groups(uint32_t* keys, uint32_t* group_keys, const Launch& launch) {
    const Sizes& s = launch.sizes;
    const GateOptions& o = launch.params.gate.options;
    const int lane = threadIdx.x % 32, member = lane % s.search_lanes, step = 32 / s.search_lanes;
    const auto group_of = [&](int first) { return min(first + lane / s.search_lanes, o.num_groups - 1); };  // the last may be done twice
#pragma unroll 1
    for (int first = 0; first < o.num_groups; first += step) {
        const float score = score_of_group(keys, launch, group_of(first), member);
        if (member == 0) group_keys[group_of(first)] = ordered_with_nan(score);
    }
    __syncwarp();
#pragma unroll 1
    for (int first = 0; first < o.num_groups; first += step) {
        const int group = group_of(first);
        const uint32_t key = group_keys[group];
        int better = 0;
#pragma unroll 1
        for (int other = 0; other < o.num_groups; ++other) better += group_keys[other] > key || (group_keys[other] == key && other < group);
        if (better >= o.topk_groups) for_members(keys, launch, group, member, [](int, uint32_t& key) { key = 0; });
    }
    __syncwarp();
}

}  // namespace
}  // namespace deepep_moe

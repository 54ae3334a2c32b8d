// The gate's forward: scores in double precision, group-limited top-k, weights and counts, defined in common/gate.h.
//
//   Blocks      As many as the GPU holds, of 16 warps. A warp takes every (16 * blocks)-th token and loads the next one's logits meanwhile.
//   A thread    Owns a share of neighbouring experts, of one group if possible, and knows the best two of them.
//   A warp      Scores all experts, keeps the best groups, takes the top-k, best first, and writes indices, weights and other outputs.
//   A block     Counts in shared memory, and adds its counts to the result at its end.
//
// No block waits for another. Each launch also zeroes the counts of the next one, which may begin while this one runs. Rare paths are not
// inlined, and take no address of a variable in registers, as that would move the variable to memory.
#include <algorithm>

#include "cuda/device/launch.cuh"
#include "cuda/device/scores.cuh"
#include "cuda/driver.h"
#include "cuda/launch.h"

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
    const GpuGateParams& p = launch.params;
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
    const GateOptions& o = launch.params.options;
    float* const row = launch.params.shares + token * o.num_experts;
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
    const int group_size = launch.params.options.num_experts / launch.params.options.num_groups;
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
    for (int n = 0; n < launch.params.options.group_score_topk; ++n) {
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
    const GateOptions& o = launch.params.options;
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

template <int kQuads>
struct Gate {
    static constexpr int kShare = kQuads * kQuad;

    const Launch& launch;
    const GpuGateParams& p;
    const GateOptions& o;
    const Sizes& s;
    const int lane, set, member;  // this thread is number `member` of its set
    const int first, num_own;     // it owns num_own experts from `first` on
    float bias[kShare];           // bias of these experts
    int32_t* const counts;        // [num_experts + num_ranks] counts of the block, in shared memory
    float* const scores;          // scores and keys of the warp's token, in shared memory
    uint32_t* const keys;
    uint32_t* const group_keys;  // [num_groups]; unused where sets are groups

    __device__ Gate(const Launch& launch, int32_t* shared)
        : launch(launch),
          p(launch.params),
          o(p.options),
          s(launch.sizes),
          lane(threadIdx.x % 32),
          set(lane >> s.set_shift),
          member(lane - (set << s.set_shift)),
          first(first_expert(lane)),
          num_own(set * s.set_size < o.num_experts ? min(s.share, s.set_size - member * s.share) : 0),
          bias{},
          counts(shared),
          scores(reinterpret_cast<float*>(shared) + s.count_words + threadIdx.x / 32 * s.words_of_warp),
          keys(reinterpret_cast<uint32_t*>(scores) + 32 * kShare),
          group_keys(keys + 32 * kShare) {}

    __device__ int first_expert(int of_lane) const {
        const int of_set = of_lane >> s.set_shift;
        return of_set * s.set_size + (of_lane - (of_set << s.set_shift)) * s.share;
    }

    __device__ void fetch_bias() {
        if (p.expert_bias != nullptr) load_quads(p.expert_bias, DType::kFloat32, first, num_own, s.is_aligned, bias);
    }

    // Load this thread's logits of a token as fp32, and 0 behind them.
    __device__ void fetch(int64_t token, float (&logits)[kShare]) const {
        const int count = token < o.num_tokens ? num_own : 0;
        load_quads(p.logits, o.dtype, token * o.num_experts + first, count, s.is_aligned, logits);
    }

    // Route one token. Thread k gets the token's k-th expert, or -1.
    __device__ void route(int64_t token, float (&logits)[kShare]) const {
        int expert = -1;
        float weight = 0.0f;
        const bool is_masked = p.mask != nullptr && p.mask[token];
        if (!is_masked && score(token, logits)) {
            const unsigned chosen = choose();
            if (lane < o.num_topk) expert = first_expert(chosen / kMaxShare) + chosen % kMaxShare;
            weight = weigh(expert, chosen);
        }
        if (expert >= 0) atomicAdd(counts + expert, 1);
        write_lanes(token, expert, weight);
        if (p.probs != nullptr) write_row(token, expert, weight);
        if (p.num_ranks > 0) write_ranks(token, expert);
        if (p.shares != nullptr) write_shares(scores, launch, token, first, num_own, __shfl_sync(kFullWarp, expert, 0) >= 0);
        __syncwarp();
    }

    // ---- scores, and selection scores as ordered integers; 0: cannot be chosen ----

    // Turn logits into scores. Returns false, with the failure reported, if a logit or the bias is not accepted.
    __device__ bool score(int64_t token, float (&x)[kShare]) const {
        float largest_logit = 0.0f, largest_bias = 0.0f;
#pragma unroll
        for (int i = 0; i < kShare; ++i) {
            largest_logit = max_or_nan(largest_logit, fabsf(x[i]));
            largest_bias = max_or_nan(largest_bias, fabsf(bias[i]));
        }
        const bool is_usual = __all_sync(kFullWarp, largest_logit <= kSigmoidBound && largest_bias < INFINITY);
        if (!is_usual) {
            if (!is_accepted(launch, token)) return false;
#pragma unroll
            for (int i = 0; i < kShare; ++i)
                if (o.score_function == ScoreFunction::kSigmoid) x[i] = bounded(x[i]);
        }
        to_scores(x);
        uint32_t key[kShare];
#pragma unroll
        for (int i = 0; i < kShare; ++i) key[i] = ordered(__fadd_rn(__fadd_rn(x[i], bias[i]), 0.0f));  // -0 is 0
        if (!is_usual) {
#pragma unroll
            for (int i = 0; i < kShare; ++i) key[i] = x[i] == x[i] ? key[i] : ordered_with_nan(x[i]);
        }
        if (!s.is_full) {
#pragma unroll
            for (int i = 0; i < kShare; ++i) key[i] = i < num_own ? key[i] : 0;
        }
#pragma unroll
        for (int i = 0; i < kShare; i += kQuad) {
            *pieces(scores + place_of(lane, i)) = Piece<DType::kFloat32>::store(x + i);
            *pieces(keys + place_of(lane, i)) = make_uint4(key[i], key[i + 1], key[i + 2], key[i + 3]);
        }
        __syncwarp();
        return true;
    }

    __device__ void to_scores(float (&x)[kShare]) const {
        if (o.score_function == ScoreFunction::kSigmoid) {
#pragma unroll
            for (int i = 0; i < kShare; ++i) x[i] = static_cast<float>(sigmoid_of(x[i]));
            return;
        }
        double largest = 0.0, factor = 0.0;
        if (o.score_function == ScoreFunction::kSoftmax) sum_exponentials(x, largest, factor);
#pragma unroll
        for (int i = 0; i < kShare; ++i) x[i] = score_of(x[i], o.score_function, largest, factor);
    }

    // For a softmax over all experts: find the largest logit, and the factor of all exponentials, 1 / their sum.
    __device__ void sum_exponentials(const float (&x)[kShare], double& largest, double& factor) const {
        float mine = -INFINITY;
#pragma unroll
        for (int i = 0; i < kShare; ++i) mine = i < num_own ? fmaxf(mine, x[i]) : mine;
        largest = warp_max(mine);
        double sum = 0.0;
#pragma unroll
        for (int i = 0; i < kShare; ++i) sum += i < num_own ? exp_of_shifted(x[i], largest) : 0.0;
        factor = 1.0 / warp_sum(sum);
    }

    // ---- top-k: every thread knows its best two experts; the best of all wins, and its owner's next best takes its place ----

    // Returns the k-th expert in thread k, as owner * kMaxShare + position in the owner's share.
    __device__ unsigned choose() const {
        const bool is_limited = o.topk_groups < o.num_groups;
        if (is_limited && !s.sets_are_groups) limit_groups(keys, group_keys, launch);
        BestTwo two = best_two();
        if (is_limited && s.sets_are_groups && !is_in_best_groups(two)) two = BestTwo();
        unsigned chosen = 0;
#pragma unroll 1
        for (int k = 0; k < o.num_topk; ++k) {
            const uint32_t top = __reduce_max_sync(kFullWarp, two.best);
            const unsigned mine = lane * kMaxShare + two.best_at;  // among equal keys the smallest has the lowest expert
            const unsigned winner = __reduce_min_sync(kFullWarp, two.best == top ? mine : ~0u);
            if (lane == k) chosen = winner;
            const bool is_mine = mine == winner;
            if (__ballot_sync(kFullWarp, is_mine && two.second == 0) != 0) {
                const BestTwo next = best_behind(top, winner);
                if (is_mine) two = next;
            } else if (is_mine) {
                two.best = two.second, two.best_at = two.second_at, two.second = 0;
            }
        }
        return chosen;
    }

    __device__ BestTwo best_two() const {
        BestTwo two;
#pragma unroll
        for (unsigned i = 0; i < kShare; i += kQuad) {
            const uint4 key = *pieces(keys + place_of(lane, i));
            two.add(key.x, i), two.add(key.y, i + 1), two.add(key.z, i + 2), two.add(key.w, i + 3);
        }
        return two;
    }

    // Returns the best expert of the winner's thread that ranks behind the winner, whose key is `top`.
    __device__ BestTwo best_behind(uint32_t top, unsigned winner) const {
        const unsigned at = winner % kMaxShare;
        const uint32_t key = lane < kShare ? keys[place_of(winner / kMaxShare, lane)] : 0;
        const bool is_behind = (key < top) | ((key == top) & (lane > at));
        BestTwo next;
        next.best = __reduce_max_sync(kFullWarp, is_behind ? key : 0);
        next.best_at = __ffs(__ballot_sync(kFullWarp, is_behind && key == next.best)) - 1;
        return next;
    }

    // Returns whether this thread's group is one of the best.
    __device__ bool is_in_best_groups(const BestTwo& two) const {
        uint32_t best = two.best, second = two.second;
#pragma unroll 1
        for (int step = 1; step < 1 << s.set_shift; step *= 2) {
            const uint32_t other = __shfl_xor_sync(kFullWarp, best, step);
            second = max(max(second, __shfl_xor_sync(kFullWarp, second, step)), min(best, other));
            best = max(best, other);
        }
        const uint32_t mine = o.group_score_topk == 1 ? best : ordered_with_nan(__fadd_rn(from_ordered(best), from_ordered(second)));
        int better = 0;
#pragma unroll 1
        for (int other = member; other < o.num_groups + member; other += 1 << s.set_shift) {
            const uint32_t theirs = __shfl_sync(kFullWarp, mine, other << s.set_shift);
            better += (other < o.num_groups) & ((theirs > mine) | ((theirs == mine) & (other < set)));
        }
#pragma unroll 1
        for (int step = 1; step < 1 << s.set_shift; step *= 2) better += __shfl_xor_sync(kFullWarp, better, step);
        return better < o.topk_groups;
    }

    // ---- weights and outputs ----

    __device__ float weigh(int expert, unsigned chosen) const {
        const unsigned owner = chosen / kMaxShare, at = chosen % kMaxShare;
        const float score = expert >= 0 ? scores[place_of(owner, at)] : -INFINITY;
        double weight = expert >= 0 ? score : 0.0f, epsilon = kWeightEpsilon;
        const bool is_softmax = o.score_function == ScoreFunction::kSoftmaxTopk;
        if (is_softmax) {
            const float largest = warp_max(score);
            weight = expert >= 0 ? exp_of_shifted(score, largest) : 0.0;
            epsilon = 0.0;
        }
        if (is_softmax || o.normalize) weight *= reciprocal_of_sum(warp_sum(weight, o.num_topk) + epsilon);
        return static_cast<float>(weight * o.routed_scaling_factor);
    }

    __device__ void write_lanes(int64_t token, int expert, float weight) const {
        if (lane >= o.num_topk) return;
        const int64_t at = token * o.num_topk + lane;
        if (o.index64)
            static_cast<int64_t*>(p.topk_idx)[at] = expert;
        else
            static_cast<int32_t*>(p.topk_idx)[at] = expert;
        p.topk_weights[at] = weight;
    }

    __device__ void write_row(int64_t token, int expert, float weight) const {
        float* probs = p.probs + token * o.num_experts;
        bool* routing_map = p.routing_map + token * o.num_experts;
        zero_any_row(probs, 4 * o.num_experts);
        zero_any_row(routing_map, o.num_experts);
        __syncwarp();
        if (expert >= 0) probs[expert] = weight, routing_map[expert] = true;
    }

    // Write to which ranks the token goes; each thread takes one rank.
    __device__ void write_ranks(int64_t token, int expert) const {
        const int rank_of_expert = expert >= 0 ? expert / (o.num_experts / p.num_ranks) : -1;
#pragma unroll 1
        for (int first = 0; first < p.num_ranks; first += 32) {
            const int rank = first + lane;
            bool goes = false;
#pragma unroll 1
            for (int k = 0; k < o.num_topk; ++k) goes |= __shfl_sync(kFullWarp, rank_of_expert, k) == rank;
            if (rank >= p.num_ranks) continue;
            p.is_token_in_rank[token * p.num_ranks + rank] = goes;
            if (goes) atomicAdd(counts + o.num_experts + rank, 1);
        }
    }
};

// ---- the kernel ----

template <int kQuads>
__global__ void __launch_bounds__(kThreads, blocks_per_sm(kQuads)) gate(const __grid_constant__ Launch launch) {
    const GpuGateParams& p = launch.params;
    const int num_counts = launch.sizes.num_counts;
    int32_t* const counts = shared_memory<int32_t>();
    Gate<kQuads> warp(launch, counts);
    const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps;
    int64_t token = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
#pragma unroll 1
    for (int i = threadIdx.x; i < num_counts; i += kThreads) counts[i] = 0;
    wait_for_kernel_before();
    float logits[kQuads * kQuad];
    warp.fetch(token, logits);
    warp.fetch_bias();
#pragma unroll 1
    for (int i = blockIdx.x * kThreads + threadIdx.x; p.next_counts != nullptr && i < num_counts; i += gridDim.x * kThreads)
        p.next_counts[i] = 0;
    __syncthreads();
#pragma unroll 1
    for (; token < p.options.num_tokens; token += step) {
        warp.route(token, logits);
        if (token + step < p.options.num_tokens) warp.fetch(token + step, logits);
    }
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < num_counts; i += kThreads)
        if (counts[i] != 0) atomicAdd(p.num_tokens_per_expert + i, counts[i]);
}

bool is_quad_aligned(const void* numbers, DType dtype) {
    return reinterpret_cast<uintptr_t>(numbers) % (kQuad * element_bytes(dtype)) == 0;
}

// Returns how many threads each of `num` groups gets: the largest power of two for which all groups fit into a warp, or 1.
int lanes_for_each(int num) {
    int lanes = 32;
    while (lanes > 1 && lanes * num > 32) lanes /= 2;
    return lanes;
}

// Returns how many of `size` experts each of `lanes` threads owns at most. It is a multiple of kQuad if `size` is.
int share_of(int size, int lanes) {
    const int unit = size % kQuad == 0 ? kQuad : 1;
    return divide_up(size / unit, lanes) * unit;
}

Sizes sizes_of(const GpuGateParams& p) {
    const GateOptions& o = p.options;
    const bool is_limited = o.topk_groups < o.num_groups;
    const int group_size = o.num_experts / o.num_groups;
    Sizes s{};
    s.search_lanes = lanes_for_each(o.num_groups);
    s.search_share = divide_up(group_size, s.search_lanes);
    s.sets_are_groups = is_limited && o.num_groups <= 32 && o.group_score_topk <= 2 && share_of(group_size, s.search_lanes) <= kMaxShare;
    s.set_size = s.sets_are_groups ? group_size : o.num_experts;
    const int set_lanes = s.sets_are_groups ? s.search_lanes : 32;
    while (1 << s.set_shift < set_lanes) ++s.set_shift;
    s.share = share_of(s.set_size, set_lanes);
    s.num_counts = o.num_experts + p.num_ranks;
    s.count_words = divide_up(s.num_counts, 4) * 4;
    s.is_aligned = s.set_size % kQuad == 0 && is_quad_aligned(p.logits, o.dtype) && is_quad_aligned(p.expert_bias, DType::kFloat32) &&
                   is_quad_aligned(p.shares, DType::kFloat32);
    return s;
}

template <int kQuads>
void launch_gate_of(Launch params, void* stream) {
    const GateOptions& o = params.params.options;
    Sizes& s = params.sizes;
    const bool has_group_keys = o.topk_groups < o.num_groups && !s.sets_are_groups;
    s.is_full = s.share == kQuads * kQuad && (o.num_experts / s.set_size) << s.set_shift == 32 && s.share << s.set_shift == s.set_size;
    s.words_of_warp = 2 * 32 * kQuads * kQuad + (has_group_keys ? divide_up(o.num_groups, 4) * 4 : 0);
    const int64_t most = blocks_per_sm(kQuads) * attribute(cudaDevAttrMultiProcessorCount);
    const int64_t shared_bytes = int64_t{4} * (s.count_words + kWarps * s.words_of_warp);
    launch<gate<kQuads>>("gate", static_cast<int>(std::min(divide_up(o.num_tokens, kWarps), most)), kThreads, shared_bytes, params, stream,
                         can_start_early(stream));
}

}  // namespace

void launch_gate(const GpuGateParams& p, void* stream) {
    const Launch params{p, sizes_of(p)};
    const int quads = divide_up(params.sizes.share, kQuad);
    static_assert(kMaxGateExperts <= 32 * kMaxShare);
    if (quads == 1) return launch_gate_of<1>(params, stream);
    if (quads == 2) return launch_gate_of<2>(params, stream);
    if (quads == 3) return launch_gate_of<3>(params, stream);
    if (quads == 4) return launch_gate_of<4>(params, stream);
    launch_gate_of<kMaxQuads>(params, stream);
}

}  // namespace deepep_moe

// The gate's forward: scores in double precision, group-limited top-k, weights and counts, defined in common/gate.h.
//
//   Blocks      As many as the GPU holds, of 16 warps. A warp takes every (16 * blocks)-th token and loads the next one's logits meanwhile.
//   A thread    Owns a share of neighbouring experts, of one group if possible, and knows the best two of them.
//   A warp      Scores all experts, keeps the best groups, takes the top-k, best first, and writes indices, weights and other outputs.
//   A block     Counts in shared memory, and adds its counts to the result at its end.
//
// No block waits for another. Each launch also zeroes the counts of the next one, which may begin while this one runs.
#include "cuda/device/gate_parts.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/launch.h"

namespace deepep_moe {
namespace {

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
          o(p.gate.options),
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
        if (p.gate.expert_bias != nullptr) load_quads(p.gate.expert_bias, DType::kFloat32, first, num_own, s.is_aligned, bias);
    }

    // Load this thread's logits of a token as fp32, and 0 behind them.
    __device__ void fetch(int64_t token, float (&logits)[kShare]) const {
        const int count = token < o.num_tokens ? num_own : 0;
        load_quads(p.gate.logits, o.dtype, token * o.num_experts + first, count, s.is_aligned, logits);
    }

    // Route one token. Thread k gets the token's k-th expert, or -1.
    __device__ void route(int64_t token, float (&logits)[kShare]) const {
        int expert = -1;
        float weight = 0.0f;
        const bool is_masked = p.gate.mask != nullptr && p.gate.mask[token];
        if (!is_masked && score(token, logits)) {
            const unsigned chosen = choose();
            if (lane < o.num_topk) expert = first_expert(chosen / kMaxShare) + chosen % kMaxShare;
            weight = weigh(expert, chosen);
        }
        if (expert >= 0) atomicAdd(counts + expert, 1);
        write_lanes(token, expert, weight);
        if (p.probs != nullptr) write_row(token, expert, weight);
        if (p.num_ranks > 0) write_ranks(token, expert);
        if (p.gate.shares != nullptr) write_shares(scores, launch, token, first, num_own, __shfl_sync(kFullWarp, expert, 0) >= 0);
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
            static_cast<int64_t*>(p.gate.topk_idx)[at] = expert;
        else
            static_cast<int32_t*>(p.gate.topk_idx)[at] = expert;
        p.gate.topk_weights[at] = weight;
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
    for (; token < p.gate.options.num_tokens; token += step) {
        warp.route(token, logits);
        if (token + step < p.gate.options.num_tokens) warp.fetch(token + step, logits);
    }
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < num_counts; i += kThreads)
        if (counts[i] != 0) atomicAdd(p.gate.num_tokens_per_expert + i, counts[i]);
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
    const GateOptions& o = p.gate.options;
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
    s.is_aligned = s.set_size % kQuad == 0 && is_quad_aligned(p.gate.logits, o.dtype) &&
                   is_quad_aligned(p.gate.expert_bias, DType::kFloat32) && is_quad_aligned(p.gate.shares, DType::kFloat32);
    return s;
}

template <int kQuads>
void launch_gate_of(Launch params, void* stream) {
    const GateOptions& o = params.params.gate.options;
    Sizes& s = params.sizes;
    const bool has_group_keys = o.topk_groups < o.num_groups && !s.sets_are_groups;
    s.is_full = s.share == kQuads * kQuad && (o.num_experts / s.set_size) << s.set_shift == 32 && s.share << s.set_shift == s.set_size;
    s.words_of_warp = 2 * 32 * kQuads * kQuad + (has_group_keys ? divide_up(o.num_groups, 4) * 4 : 0);
    int device = 0, num_multiprocessors = 0;
    cudaError_t status = cudaGetDevice(&device);
    if (status == cudaSuccess) status = cudaDeviceGetAttribute(&num_multiprocessors, cudaDevAttrMultiProcessorCount, device);
    if (status != cudaSuccess) throw std::runtime_error(std::string("launch of gate failed: ") + cudaGetErrorString(status));
    const int64_t wanted = divide_up(o.num_tokens, kWarps), most = int64_t{blocks_per_sm(kQuads)} * num_multiprocessors;
    const int64_t shared_bytes = int64_t{4} * (s.count_words + kWarps * s.words_of_warp);
    if (wanted > 0)
        launch<gate<kQuads>>("gate", static_cast<int>(wanted < most ? wanted : most), kThreads, shared_bytes, params, stream,
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

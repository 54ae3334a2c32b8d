// The gate's forward, a token a warp: scores in double precision, group-limited top-k, weights and counts, defined in common/gate_params.h.
// Each lane owns `chunk` neighbouring experts, whose scores and selection keys lie in shared memory, so that others can look at them.
#include "cuda/device/launch.cuh"
#include "cuda/device/scores.cuh"
#include "cuda/launch.h"

namespace deepep_moe {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kBlocksPerMultiprocessor = 4;
constexpr int kLoads = 2;  // quads of logits, and of biases, that a lane has in flight

// What all warps know: sizes that follow from the options.
struct Sizes {
    int chunk;                         // experts of a lane, in quads
    int group_size, group_lanes;       // lanes that look at a group together: a power of two
    int lane_members;                  // experts of a group that one of them looks at, at most
    bool has_member_quads;             // always as many, in quads
    int num_counts;                    // experts and ranks
    int count_words, words_of_warp;    // shared memory, in words
    bool is_aligned;                   // quads of logits and bias
};

struct Launch {
    GpuGateParams params;
    Sizes sizes;
};

// f(expert) for a lane's share of a group: `lane_members` neighbours. Groups begin at different ones, as these lie in different banks.
template <class F>
__device__ __forceinline__ void for_members(const Sizes& s, int group, int member, const F& f) {
    int at = group < s.lane_members ? group : 0;
#pragma unroll 1
    for (int i = 0; i < s.lane_members; ++i) {
        const int offset = member * s.lane_members + at;
        if (offset < s.group_size) f(group * s.group_size + offset);
        if (++at == s.lane_members) at = 0;
    }
}

struct BestTwo {
    uint32_t best = 0, second = 0;
    __device__ __forceinline__ void add(uint32_t key) {
        second = max(second, min(best, key));
        best = max(best, key);
    }
};

// What happens seldom stays out of the way, and takes no address of what lies in registers.
__device__ bool is_finite_after_all(const Launch& launch, int64_t token);
__device__ float score_of_best(const Launch& launch, const uint32_t* keys, int group, int member);

struct Gate {
    const Launch& launch;
    const GpuGateParams& p;
    const GateOptions& o;
    const Sizes& s;
    const int lane;
    int32_t* const counts;        // shared memory [num_experts + num_ranks], of the block
    float* const scores;          // shared memory [32 * chunk]: logits, then scores; of this warp, as all that follows
    uint32_t* const keys;         // [32 * chunk] selection scores as ordered integers; 0: cannot be chosen
    uint32_t* const group_keys;   // [num_groups]

    __device__ Gate(const Launch& launch, int32_t* shared)
        : launch(launch), p(launch.params), o(p.gate.options), s(launch.sizes), lane(threadIdx.x % 32), counts(shared),
          scores(reinterpret_cast<float*>(shared) + s.count_words + threadIdx.x / 32 * s.words_of_warp),
          keys(reinterpret_cast<uint32_t*>(scores) + 32 * s.chunk), group_keys(keys + 32 * s.chunk) {}

    // Lane k has the token's k-th expert, -1 where there is none.
    __device__ void route(int64_t token) const {
        int expert = -1;
        float weight = 0.0f;
        const bool is_masked = p.gate.mask != nullptr && p.gate.mask[token];
        if (!is_masked && score(token)) {
            if (o.topk_groups < o.num_groups) limit_groups();
            expert = choose();
            weight = weigh(expert);
        }
        if (expert >= 0) atomicAdd(counts + expert, 1);
        write_lanes(token, expert, weight);
        if (p.probs != nullptr) write_row(token, expert, weight);
        if (p.num_ranks > 0) write_ranks(token, expert);
        __syncwarp();
    }

    // ---- scores ----

    // False, with the failure told, where a logit or the bias is not finite.
    __device__ bool score(int64_t token) const {
        float not_finite = 0.0f;  // NaN once something was not
        load(token, not_finite);
        double largest = 0.0, factor = 0.0;
        if (o.score_function == ScoreFunction::kSoftmax) sum_exponentials(largest, factor);
#pragma unroll 1
        for (int first = lane * s.chunk; first < (lane + 1) * s.chunk; first += kQuad) {
            float x[kQuad], bias[kQuad];
            Piece<DType::kFloat32>::load(*pieces(scores + first), x);
            Piece<DType::kFloat32>::load(*pieces(keys + first), bias);
            score_quad(x, largest, factor);
            uint32_t key[kQuad];
#pragma unroll
            for (int i = 0; i < kQuad; ++i) {
                const float selection = __fadd_rn(x[i], bias[i]);
                not_finite = __fmaf_rn(selection, 0.0f, not_finite);
                key[i] = first + i < o.num_experts ? ordered(selection) : 0;
            }
            *pieces(scores + first) = Piece<DType::kFloat32>::store(x);
            *pieces(keys + first) = make_uint4(key[0], key[1], key[2], key[3]);
        }
        __syncwarp();
        return __ballot_sync(kFullWarp, not_finite != 0.0f) == 0 || is_finite_after_all(launch, token);
    }

    // The token's logits to shared memory, and the bias to where the keys will be: each lane its own, all of them in flight at once.
    __device__ void load(int64_t token, float& not_finite) const {
        const int begin = lane * s.chunk, end = begin + s.chunk, num_biases = p.gate.expert_bias == nullptr ? 0 : o.num_experts;
        const int64_t row = token * o.num_experts;
#pragma unroll 1
        for (int first = begin; first < end; first += kLoads * kQuad) {
            uint4 logits[kLoads], bias[kLoads];
#pragma unroll
            for (int i = 0; i < kLoads; ++i) {
                const int expert = first + i * kQuad;
                logits[i] = load_quad(p.gate.logits, o.dtype, row + expert, min(o.num_experts, end) - expert, s.is_aligned);
                bias[i] = load_quad(p.gate.expert_bias, DType::kFloat32, expert, min(num_biases, end) - expert, s.is_aligned);
            }
#pragma unroll
            for (int i = 0; i < kLoads; ++i) {
                if (first + i * kQuad >= end) continue;
                *pieces(scores + first + i * kQuad) = logits[i];
                *pieces(keys + first + i * kQuad) = bias[i];
                float x[kQuad];
                Piece<DType::kFloat32>::load(logits[i], x);
#pragma unroll
                for (int j = 0; j < kQuad; ++j) not_finite = __fmaf_rn(x[j], 0.0f, not_finite);
            }
        }
    }

    // Of a softmax over all experts: the largest logit, and what exponentials are to be multiplied with.
    __device__ void sum_exponentials(double& largest, double& factor) const {
        const int begin = lane * s.chunk, end = min(begin + s.chunk, o.num_experts);
        float mine = -INFINITY;
#pragma unroll 1
        for (int expert = begin; expert < end; ++expert) mine = fmaxf(mine, scores[expert]);
        largest = warp_max(mine);
        double sum = 0.0;
#pragma unroll 1
        for (int expert = begin; expert < end; ++expert) sum += exp_of_shifted(scores[expert], largest);
        factor = 1.0 / warp_sum(sum);
    }

    __device__ void score_quad(float (&x)[kQuad], double largest, double factor) const {
        if (o.score_function == ScoreFunction::kSigmoid) {
#pragma unroll
            for (int i = 0; i < kQuad; ++i) x[i] = static_cast<float>(sigmoid_of(x[i]));
        } else if (o.score_function == ScoreFunction::kSoftmax) {
#pragma unroll
            for (int i = 0; i < kQuad; ++i) x[i] = static_cast<float>(exp_of_shifted(x[i], largest) * factor);
        } else if (o.score_function == ScoreFunction::kSqrtSoftplus) {
#pragma unroll
            for (int i = 0; i < kQuad; ++i) x[i] = static_cast<float>(sqrt_softplus_of(x[i]));
        }
    }

    // ---- groups: `group_lanes` lanes a group, as many groups at a time as that makes ----

    // Takes the experts out of the choice that are not in one of the token's best groups.
    __device__ void limit_groups() const {
        const int member = lane % s.group_lanes, step = 32 / s.group_lanes;
#pragma unroll 1
        for (int first = 0; first < o.num_groups; first += step) {
            const int group = min(first + lane / s.group_lanes, o.num_groups - 1);  // one too many is done twice
            const float score = o.group_score_topk <= 2 ? score_of_best_two(group, member) : score_of_best(launch, keys, group, member);
            if (member == 0) group_keys[group] = ordered(score);
        }
        __syncwarp();
#pragma unroll 1
        for (int first = 0; first < o.num_groups; first += step) {
            const int group = min(first + lane / s.group_lanes, o.num_groups - 1);
            if (num_better_groups(group, member) >= o.topk_groups) drop(group, member);
        }
        __syncwarp();
    }

    __device__ float score_of_best_two(int group, int member) const {
        BestTwo two;
        if (s.has_member_quads)
            for_member_quads(group, member, [&](uint4& key) { two.add(key.x), two.add(key.y), two.add(key.z), two.add(key.w); });
        else
            for_members(s, group, member, [&](int expert) { two.add(keys[expert]); });
#pragma unroll 1
        for (int step = 1; step < s.group_lanes; step *= 2) {
            const uint32_t best = __shfl_xor_sync(kFullWarp, two.best, step), second = __shfl_xor_sync(kFullWarp, two.second, step);
            two.add(best);
            two.second = max(two.second, second);
        }
        return o.group_score_topk == 1 ? from_ordered(two.best) : __fadd_rn(from_ordered(two.best), from_ordered(two.second));
    }

    // The same share, four keys at a time.
    template <class F>
    __device__ void for_member_quads(int group, int member, const F& f) const {
        uint32_t* first = keys + group * s.group_size + member * s.lane_members;
#pragma unroll 1
        for (int i = 0; i < s.lane_members; i += kQuad) f(*pieces(first + i));
    }

    __device__ void drop(int group, int member) const {
        if (s.has_member_quads)
            for_member_quads(group, member, [](uint4& key) { key = make_uint4(0, 0, 0, 0); });
        else
            for_members(s, group, member, [&](int expert) { keys[expert] = 0; });
    }

    __device__ int num_better_groups(int group, int member) const {
        const uint32_t key = group_keys[group];
        int better = 0;
#pragma unroll 1
        for (int other = member; other < o.num_groups; other += s.group_lanes)
            better += group_keys[other] > key || (group_keys[other] == key && other < group);
#pragma unroll 1
        for (int step = 1; step < s.group_lanes; step *= 2) better += __shfl_xor_sync(kFullWarp, better, step);
        return better;
    }

    // ---- top-k: every lane knows its best expert; the best of these wins, and its owner's next best takes its place ----

    __device__ int choose() const {
        uint32_t best = 0;
        int best_expert = lane * s.chunk, chosen = -1;
#pragma unroll 1
        for (int first = lane * s.chunk; first < (lane + 1) * s.chunk; first += kQuad) {
            const uint4 key = *pieces(keys + first);
            if (key.x > best) best = key.x, best_expert = first;
            if (key.y > best) best = key.y, best_expert = first + 1;
            if (key.z > best) best = key.z, best_expert = first + 2;
            if (key.w > best) best = key.w, best_expert = first + 3;
        }
#pragma unroll 1
        for (int k = 0; k < o.num_topk; ++k) {
            const uint32_t top = __reduce_max_sync(kFullWarp, best);
            const int owner = __ffs(__ballot_sync(kFullWarp, best == top)) - 1;  // of equals the first lane has the lowest experts
            const int winner = __shfl_sync(kFullWarp, best_expert, owner);
            if (lane == k) chosen = winner;
            // The owner's experts, one a lane, and always the same lane for one expert.
            const int expert = owner * s.chunk + lane;
            if (expert == winner) keys[expert] = 0;
            const uint32_t key = lane < s.chunk ? keys[expert] : 0;
            const uint32_t next = __reduce_max_sync(kFullWarp, key);
            const int first = __ffs(__ballot_sync(kFullWarp, key == next)) - 1;
            if (lane == owner) best = next, best_expert = owner * s.chunk + first;
        }
        return chosen;
    }

    // ---- weights and what is written ----

    __device__ float weigh(int expert) const {
        const float chosen = expert >= 0 ? scores[expert] : -INFINITY;
        double weight = expert >= 0 ? chosen : 0.0f, epsilon = kWeightEpsilon;
        const bool is_softmax = o.score_function == ScoreFunction::kSoftmaxTopk;
        if (is_softmax) {
            const float largest = warp_max(chosen);
            weight = expert >= 0 ? exp_of_shifted(chosen, largest) : 0.0;
            epsilon = 0.0;
        }
        if (is_softmax || o.normalize) weight /= warp_sum(weight) + epsilon;
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

    // A rank a lane.
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

// Tells the host what is not. A logit and its bias may also add up to infinity, which is no failure.
__device__ __noinline__ bool is_finite_after_all(const Launch& launch, int64_t token) {
    const GateParams& p = launch.params.gate;
    const GateOptions& o = p.options;
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int first = 0; first < o.num_experts; first += 32) {
        const int expert = first + lane;
        const float logit = expert < o.num_experts ? load_number(p.logits, o.dtype, token * o.num_experts + expert) : 0.0f;
        const float bias = expert < o.num_experts && p.expert_bias != nullptr ? p.expert_bias[expert] : 0.0f;
        const unsigned found = __ballot_sync(kFullWarp, !is_finite(logit) || !is_finite(bias));
        if (found == 0) continue;
        const float x = is_finite(logit) ? bias : logit;
        const GateFailure what = x != x ? GateFailure::kNan : x > 0.0f ? GateFailure::kInf : GateFailure::kMinusInf;
        const int whats = static_cast<int>(what) + (is_finite(logit) ? static_cast<int>(GateFailure::kBias) : 0);
        if (lane == __ffs(found) - 1)
            *static_cast<volatile unsigned long long*>(launch.params.failure) =
                static_cast<unsigned long long>(token) << kFailureTokenShift | static_cast<unsigned>(whats << kFailureWhatShift | expert);
        return false;
    }
    return true;
}

// Of any number of experts, one after the other: the best that is behind the one before.
__device__ __noinline__ float score_of_best(const Launch& launch, const uint32_t* keys, int group, int member) {
    const Sizes& s = launch.sizes;
    unsigned long long bound = ~0ull;
    float sum = 0.0f;
#pragma unroll 1
    for (int n = 0; n < launch.params.gate.options.group_score_topk; ++n) {
        unsigned long long best = 0;  // the key above, the complement of the index below: the larger, the better
        for_members(s, group, member, [&](int expert) {
            const unsigned long long key = static_cast<unsigned long long>(keys[expert]) << 32 | static_cast<uint32_t>(~expert);
            if (key < bound) best = max(best, key);
        });
#pragma unroll 1
        for (int step = 1; step < s.group_lanes; step *= 2) best = max(best, __shfl_xor_sync(kFullWarp, best, step));
        sum = __fadd_rn(sum, from_ordered(static_cast<uint32_t>(best >> 32)));
        bound = best;
    }
    return sum;
}

__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor) gate(const __grid_constant__ Launch launch) {
    const GpuGateParams& p = launch.params;
    const int num_counts = launch.sizes.num_counts;
    int32_t* const counts = shared_memory<int32_t>();
#pragma unroll 1
    for (int i = threadIdx.x; i < num_counts; i += kThreads) counts[i] = 0;
#pragma unroll 1
    for (int i = blockIdx.x * kThreads + threadIdx.x; p.next_counts != nullptr && i < num_counts; i += gridDim.x * kThreads) p.next_counts[i] = 0;
    __syncthreads();
    const Gate warp(launch, counts);
    const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps;
#pragma unroll 1
    for (int64_t token = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; token < p.gate.options.num_tokens; token += step) warp.route(token);
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < num_counts; i += kThreads)
        if (counts[i] != 0) atomicAdd(p.gate.num_tokens_per_expert + i, counts[i]);
}

bool is_quad_aligned(const void* numbers, DType dtype) { return reinterpret_cast<uintptr_t>(numbers) % (kQuad * element_bytes(dtype)) == 0; }

Sizes sizes_of(const GpuGateParams& p) {
    const GateOptions& o = p.gate.options;
    Sizes s{};
    s.chunk = divide_up(o.num_experts, 32 * kQuad) * kQuad;
    s.group_size = o.num_experts / o.num_groups;
    s.group_lanes = 32;
    while (s.group_lanes > 1 && s.group_lanes * o.num_groups > 32) s.group_lanes /= 2;
    s.lane_members = divide_up(s.group_size, s.group_lanes);
    s.has_member_quads = s.group_size % (s.group_lanes * kQuad) == 0;
    s.num_counts = o.num_experts + p.num_ranks;
    s.count_words = divide_up(s.num_counts, 4) * 4;
    s.words_of_warp = 2 * 32 * s.chunk + divide_up(o.num_groups, 4) * 4;
    s.is_aligned = o.num_experts % kQuad == 0 && is_quad_aligned(p.gate.logits, o.dtype) && is_quad_aligned(p.gate.expert_bias, DType::kFloat32);
    return s;
}

}  // namespace

void launch_gate(const GpuGateParams& p, void* stream) {
    const Launch params{p, sizes_of(p)};
    int device = 0, num_multiprocessors = 0;
    cudaError_t status = cudaGetDevice(&device);
    if (status == cudaSuccess) status = cudaDeviceGetAttribute(&num_multiprocessors, cudaDevAttrMultiProcessorCount, device);
    if (status != cudaSuccess) throw std::runtime_error(std::string("launch of gate failed: ") + cudaGetErrorString(status));
    const int64_t wanted = divide_up(p.gate.options.num_tokens, kWarps), most = int64_t{kBlocksPerMultiprocessor} * num_multiprocessors;
    const int64_t shared_bytes = int64_t{4} * (params.sizes.count_words + kWarps * params.sizes.words_of_warp);
    if (wanted > 0) launch<gate>("gate", static_cast<int>(wanted < most ? wanted : most), kThreads, shared_bytes, params, stream);
}

}  // namespace deepep_moe

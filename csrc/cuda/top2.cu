// Computes top-2 gating with a capacity, which common/gate.h defines, in the order and with the roundings of PyTorch's single operators.
//
//   choose_two       One warp a token: the best expert by gates, the best other one by scores.
//
//   number_choices   One block an expert. Each warp counts its share of all choices. After a barrier it numbers them behind those of the
//                    warps before, and drops what exceeds the capacity.
//
//   weigh_two        One thread a token: the weights of the choices that stay.
//   top2_backward    One warp a token: gradients of its gates, from those of weights and loss.
//
// Each kernel needs all results of the one before, which the order of the stream ensures.
#include <cfloat>

#include "cuda/device/launch.cuh"
#include "cuda/device/sync.cuh"
#include "cuda/launch.h"

namespace deepep_moe {
namespace {

constexpr int kNumberThreads = 1024, kNumberWarps = kNumberThreads / 32;

struct Choice {
    float score;
    int expert;

    __device__ bool is_better_than(const Choice& other) const {
        const bool is_nan = score != score, other_is_nan = other.score != other.score;
        if (is_nan != other_is_nan) return is_nan;
        return score == other.score || is_nan ? expert < other.expert : score > other.score;
    }
};

// Returns the best expert of a row, where the value of `excluded` counts as -infinity. All threads of a warp call it.
__device__ int best_of(const float* row, int num_experts, int excluded) {
    Choice best{-INFINITY, num_experts};
    for (int expert = threadIdx.x % 32; expert < num_experts; expert += 32) {
        const Choice choice{expert == excluded ? -INFINITY : row[expert], expert};
        if (choice.is_better_than(best)) best = choice;
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const Choice other{__shfl_xor_sync(kFullWarp, best.score, step), __shfl_xor_sync(kFullWarp, best.expert, step)};
        if (other.is_better_than(best)) best = other;
    }
    return best.expert;
}

__global__ void __launch_bounds__(kRowThreads) choose_two(const __grid_constant__ GpuTop2Params p) {
    const int64_t token = warp_of_grid(), row = token * p.num_experts;
    const int lane = threadIdx.x % 32;
    if (token >= p.num_tokens) return;
    const int first = best_of(p.gates + row, p.num_experts, -1), second = best_of(p.scores + row, p.num_experts, first);
    if (lane < 2) p.chosen[lane * p.num_tokens + token] = lane == 0 ? first : second;
    for (int expert = lane; expert < p.num_experts; expert += 32) p.is_first[row + expert] = expert == first ? 1.0f : 0.0f;
}

__global__ void __launch_bounds__(kNumberThreads) number_choices(const __grid_constant__ GpuTop2Params p) {
    int* const counts = shared_memory<int>();  // [kNumberWarps]
    const int expert = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t num = 2 * p.num_tokens, share = divide_up(num, int64_t{kNumberThreads}) * 32, begin = warp * share;
    const int64_t end = begin + share < num ? begin + share : num;
    const auto choices_of_expert = [&](int64_t first) {
        return __ballot_sync(kFullWarp, first + lane < end && p.chosen[first + lane] == expert);
    };
    int count = 0;
    for (int64_t first = begin; first < end; first += 32) count += __popc(choices_of_expert(first));
    if (lane == 0) counts[warp] = count;
    __syncthreads();
    int64_t place = 0, total = 0;
    for (int other = 0; other < kNumberWarps; ++other) {
        place += other < warp ? counts[other] : 0;
        total += counts[other];
    }
    if (threadIdx.x == 0) p.counts[expert] = total;
    for (int64_t first = begin; first < end; first += 32) {
        const unsigned here = choices_of_expert(first);
        const int64_t own_place = place + __popc(here & ((1u << lane) - 1));
        if ((here >> lane & 1) != 0) p.topk_idx[first + lane] = own_place < p.capacity ? expert : -1;
        place += __popc(here);
    }
}

// Holds the gates of a token's two choices (0 if a choice was dropped), their sum, and their divisor.
template <class Params>
struct Weights {
    float gates[2], stays[2], sum, divisor;

    __device__ Weights(const Params& p, int64_t token) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int64_t at = i * p.num_tokens + token;
            stays[i] = p.topk_idx[at] >= 0 ? 1.0f : 0.0f;
            gates[i] = __fmul_rn(p.gates[token * p.num_experts + p.chosen[at]], stays[i]);
        }
        sum = __fadd_rn(gates[0], gates[1]);
        divisor = sum < FLT_EPSILON ? FLT_EPSILON : sum;
    }
};

__global__ void __launch_bounds__(kRowThreads) weigh_two(const __grid_constant__ GpuTop2Params p) {
    const int64_t token = static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x;
    if (token >= p.num_tokens) return;
    const Weights weights(p, token);
#pragma unroll
    for (int i = 0; i < 2; ++i) p.topk_weights[i * p.num_tokens + token] = __fdiv_rn(weights.gates[i], weights.divisor);
}

// Computes the gradients of a token's chosen gates from those of its weights.
struct ChosenGradients {
    float of[2] = {};

    __device__ ChosenGradients(const GpuTop2BackwardParams& p, int64_t token) {
        if (p.grad == nullptr) return;
        const Weights weights(p, token);
        float of_divisor[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float grad = p.grad[i * p.num_tokens + token];
            of[i] = __fdiv_rn(grad, weights.divisor);
            of_divisor[i] = __fmul_rn(-grad, __fdiv_rn(__fdiv_rn(weights.gates[i], weights.divisor), weights.divisor));
        }
        const float of_sum = weights.sum >= FLT_EPSILON ? __fadd_rn(of_divisor[0], of_divisor[1]) : 0.0f;
#pragma unroll
        for (int i = 0; i < 2; ++i) of[i] = __fmul_rn(__fadd_rn(of[i], of_sum), weights.stays[i]);
    }
};

// Like PyTorch, it divides by multiplying with the reciprocal.
__global__ void __launch_bounds__(kRowThreads) top2_backward(const __grid_constant__ GpuTop2BackwardParams p) {
    const int64_t token = warp_of_grid(), row = token * p.num_experts;
    if (token >= p.num_tokens) return;
    const ChosenGradients chosen(p, token);
    const int first = p.chosen[token], second = p.chosen[p.num_tokens + token];
    const float num_experts = static_cast<float>(p.num_experts);
    const float of_mean = p.grad_loss == nullptr
                              ? 0.0f
                              : __fmul_rn(__fmul_rn(__fmul_rn(*p.grad_loss, num_experts), num_experts), __fdiv_rn(1.0f, num_experts));
    const float share = __fdiv_rn(1.0f, static_cast<float>(p.num_tokens));
    for (int expert = threadIdx.x % 32; expert < p.num_experts; expert += 32) {
        float grad = 0.0f;
        if (expert == first) grad = chosen.of[0];
        if (expert == second) grad = __fadd_rn(grad, chosen.of[1]);
        if (p.grad_loss != nullptr) grad = __fadd_rn(grad, __fmul_rn(__fmul_rn(of_mean, p.load[expert]), share));
        p.grad_gates[row + expert] = grad;
    }
}

}  // namespace

void launch_top2(const GpuTop2Params& p, void* stream) {
    if (p.num_tokens == 0) return;
    launch<choose_two>("choose_two", blocks_of_warps(p.num_tokens), kRowThreads, 0, p, stream);
    launch<number_choices>("number_choices", p.num_experts, kNumberThreads, kNumberWarps * sizeof(int), p, stream);
    launch<weigh_two>("weigh_two", static_cast<int>(divide_up(p.num_tokens, kRowThreads)), kRowThreads, 0, p, stream);
}

void launch_top2_backward(const GpuTop2BackwardParams& p, void* stream) {
    launch<top2_backward>("top2_backward", blocks_of_warps(p.num_tokens), kRowThreads, 0, p, stream);
}

}  // namespace deepep_moe

// The gate's backward recomputes scores from the logits. Rounding to fp32 counts as the identity.
//
//   Blocks         Enough for all tokens, of 8 warps. None waits for another.
//   A warp         Takes one token: thread k has the k-th chosen expert, and the gradient of its logit.
//   All threads    Handle the experts of a row in turns if experts that were not chosen have a gradient too. They have one with shares,
//                  or with a softmax over all experts (kHasRow, a separate kernel). Else the rest of the row is zeros.
#include "cuda/device/launch.cuh"
#include "cuda/device/scores.cuh"
#include "cuda/launch.h"

namespace deepep_moe {
namespace {

// With kHasRow all experts of the token have a gradient, not only the chosen ones.
template <bool kHasRow>
struct Gradient {
    const GpuGateBackwardParams& p;
    const GateOptions& o;
    const int lane;
    const int64_t token, row;  // `row` is the offset of the token's first expert

    __device__ Gradient(const GpuGateBackwardParams& p, int64_t token)
        : p(p), o(p.options), lane(threadIdx.x % 32), token(token), row(token * o.num_experts) {}

    __device__ void run() const {
        if (!kHasRow) zero();
        const int expert = load_expert();
        if (__ballot_sync(kFullWarp, expert >= 0) == 0) {
            if (kHasRow) zero();
            return;
        }
        const float logit = expert >= 0 ? load_number(p.logits, o.dtype, row + expert) : 0.0f;
        const double grad = load_grad(expert);
        const double grad_logit = kHasRow ? with_row(logit, grad, expert) : of_chosen(logit, grad, expert);
        __syncwarp();
        if (expert >= 0) store_number(p.grad_logits, o.dtype, row + expert, static_cast<float>(grad_logit));
    }

    __device__ void zero() const {
        const int number_bytes = o.dtype == DType::kFloat32 ? 4 : 2;
        zero_any_row(static_cast<std::byte*>(p.grad_logits) + row * number_bytes, o.num_experts * number_bytes);
    }

    // Returns the expert of top-k entry `lane`, or -1.
    __device__ int load_expert() const {
        if (lane >= o.num_topk) return -1;
        const int64_t at = token * o.num_topk + lane;
        const int64_t expert = o.index64 ? static_cast<const int64_t*>(p.topk_idx)[at] : static_cast<const int32_t*>(p.topk_idx)[at];
        return expert >= 0 && expert < o.num_experts ? static_cast<int>(expert) : -1;
    }

    // Returns the gradient of this entry's weight before routed_scaling_factor.
    __device__ double load_grad(int expert) const {
        if (expert < 0) return 0.0;
        double grad = p.grad_topk_weights != nullptr ? p.grad_topk_weights[token * o.num_topk + lane] : 0.0f;
        if (p.grad_probs != nullptr) grad += p.grad_probs[row + expert];
        return grad * o.routed_scaling_factor;
    }

    // Returns the gradient of the score s, from that of the weight w = s / (sum(s) + epsilon).
    __device__ double of_score(double grad, double score, int expert) const {
        if (!o.normalize) return grad;
        const double rounded = expert >= 0 ? static_cast<float>(score) : 0.0;
        const double divisor = warp_sum(rounded) + kWeightEpsilon, dot = warp_sum(grad * rounded);
        return (grad - dot / divisor) / divisor;
    }

    __device__ double of_chosen(float logit, double grad, int expert) const {
        if (o.score_function == ScoreFunction::kSoftmaxTopk) {
            const float largest = warp_max(expert >= 0 ? logit : -INFINITY);
            const double exponential = expert >= 0 ? exp_of_shifted(logit, largest) : 0.0;
            const double prob = exponential / warp_sum(exponential);
            return prob * (grad - warp_sum(grad * prob));
        }
        const double score = part(logit, 0.0);
        return of_score(grad, score, expert) * slope(logit, score);
    }

    // ---- rows: every expert has the share f(logit) / sum(f), where f is the score, or the exponential for softmax functions ----

    __device__ bool is_exponential() const {
        return o.score_function == ScoreFunction::kSoftmax || o.score_function == ScoreFunction::kSoftmaxTopk;
    }

    __device__ double part(float logit, double largest) const {
        if (is_exponential()) return exp_of_shifted(logit, largest);
        return o.score_function == ScoreFunction::kSqrtSoftplus ? sqrt_softplus_of(logit) : sigmoid_of(bounded(logit));
    }

    // Returns the derivative of `part`.
    __device__ double slope(float logit, double value) const {
        if (is_exponential()) return value;
        return o.score_function == ScoreFunction::kSqrtSoftplus ? sqrt_softplus_slope(logit, value) : value * (1.0 - value);
    }

    __device__ float grad_share(int expert) const { return p.grad_shares != nullptr ? p.grad_shares[row + expert] : 0.0f; }

    // All gradients of a row share three numbers: the largest logit (for exponentials), 1 / sum(f), and the dot product of shares and
    // their gradients.
    struct Sums {
        double largest, factor, dot;
    };

    __device__ Sums sum_row() const {
        float largest = 0.0f;
        if (is_exponential()) {
            largest = -INFINITY;
#pragma unroll 1
            for (int i = lane; i < o.num_experts; i += 32) largest = fmaxf(largest, load_number(p.logits, o.dtype, row + i));
            largest = warp_max(largest);
        }
        double sum = 0.0, dot = 0.0;
#pragma unroll 1
        for (int i = lane; i < o.num_experts; i += 32) {
            const double mine = part(load_number(p.logits, o.dtype, row + i), largest);
            sum += mine;
            dot += grad_share(i) * mine;
        }
        const double factor = 1.0 / (warp_sum(sum) + (is_exponential() ? 0.0 : kWeightEpsilon));
        return {largest, factor, warp_sum(dot) * factor};
    }

    __device__ double of_share(float logit, int expert, const Sums& sums) const {
        return (grad_share(expert) - sums.dot) * sums.factor * slope(logit, part(logit, sums.largest));
    }

    // Write the gradients that all experts have through their shares. Returns the whole gradient of this thread's chosen expert.
    __device__ double with_row(float logit, double grad, int expert) const {
        Sums sums = sum_row();
        double grad_logit = 0.0;
        if (o.score_function == ScoreFunction::kSoftmax) {  // the score is the share, so both gradients add up
            const double prob = expert >= 0 ? exp_of_shifted(logit, sums.largest) * sums.factor : 0.0;
            grad_logit = of_score(grad, prob, expert) * prob;
            sums.dot += warp_sum(grad_logit);
        } else {
            grad_logit = of_chosen(logit, grad, expert);
        }
#pragma unroll 1
        for (int i = lane; i < o.num_experts; i += 32) {
            const double other = of_share(load_number(p.logits, o.dtype, row + i), i, sums);
            store_number(p.grad_logits, o.dtype, row + i, static_cast<float>(other));
        }
        return expert >= 0 ? grad_logit + of_share(logit, expert, sums) : 0.0;
    }
};

template <bool kHasRow>
__global__ void __launch_bounds__(kRowThreads) gate_backward(const __grid_constant__ GpuGateBackwardParams p) {
    const int64_t token = static_cast<int64_t>(blockIdx.x) * (kRowThreads / 32) + threadIdx.x / 32;
    wait_for_kernel_before();
    if (token < p.options.num_tokens) Gradient<kHasRow>(p, token).run();
}

}  // namespace

void launch_gate_backward(const GpuGateBackwardParams& p, void* stream) {
    const bool has_row = p.grad_shares != nullptr || p.options.score_function == ScoreFunction::kSoftmax;
    const auto start = [&](auto with_row) {
        launch<gate_backward<with_row.value>>("gate_backward", blocks_of_warps(p.options.num_tokens), kRowThreads, 0, p, stream,
                                              can_start_early(stream));
    };
    has_row ? start(std::true_type{}) : start(std::false_type{});
}

}  // namespace deepep_moe

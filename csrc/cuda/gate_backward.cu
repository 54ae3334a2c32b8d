// The gate's backward, a token a warp and a chosen expert a lane, which recomputes its score from the logit. Rounding to fp32 counts as
// the identity. Only a softmax over all experts has a gradient for the others.
#include "cuda/device/launch.cuh"
#include "cuda/device/scores.cuh"
#include "cuda/launch.h"

namespace deepep_moe {
namespace {

constexpr int kThreads = 256;

struct Gradient {
    const GpuGateBackwardParams& p;
    const GateOptions& o;
    const int lane;
    const int64_t token, row;  // of the token's experts

    __device__ Gradient(const GpuGateBackwardParams& p, int64_t token)
        : p(p), o(p.gate.options), lane(threadIdx.x % 32), token(token), row(token * o.num_experts) {}

    __device__ void run() const {
        const bool is_dense = o.score_function == ScoreFunction::kSoftmax;
        if (!is_dense) zero();
        const int expert = load_expert();
        if (__ballot_sync(kFullWarp, expert >= 0) == 0) {
            if (is_dense) zero();
            return;
        }
        const float logit = expert >= 0 ? load_number(p.gate.logits, o.dtype, row + expert) : 0.0f;
        const double grad = load_grad(expert), grad_logit = is_dense ? of_softmax(logit, grad, expert) : of_chosen(logit, grad, expert);
        __syncwarp();
        if (expert >= 0) store_number(p.gate.grad_logits, o.dtype, row + expert, static_cast<float>(grad_logit));
    }

    __device__ void zero() const {
        const int number_bytes = o.dtype == DType::kFloat32 ? 4 : 2;
        zero_any_row(static_cast<std::byte*>(p.gate.grad_logits) + row * number_bytes, o.num_experts * number_bytes);
    }

    // -1: none.
    __device__ int load_expert() const {
        if (lane >= o.num_topk) return -1;
        const int64_t at = token * o.num_topk + lane;
        const int64_t expert = o.index64 ? static_cast<const int64_t*>(p.gate.topk_idx)[at] : static_cast<const int32_t*>(p.gate.topk_idx)[at];
        return expert >= 0 && expert < o.num_experts ? static_cast<int>(expert) : -1;
    }

    // Of the lane's weight before routed_scaling_factor.
    __device__ double load_grad(int expert) const {
        if (expert < 0) return 0.0;
        double grad = p.gate.grad_topk_weights != nullptr ? p.gate.grad_topk_weights[token * o.num_topk + lane] : 0.0f;
        if (p.grad_probs != nullptr) grad += p.grad_probs[row + expert];
        return grad * o.routed_scaling_factor;
    }

    // From the gradient of the weight w = s / (sum(s) + epsilon) to that of the score s.
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
        if (o.score_function == ScoreFunction::kSqrtSoftplus) {
            const double score = sqrt_softplus_of(logit);
            return of_score(grad, score, expert) * sigmoid_of(bounded(logit)) / (2.0 * score);
        }
        const double score = sigmoid_of(bounded(logit));
        return of_score(grad, score, expert) * score * (1.0 - score);
    }

    // Writes the gradients of the experts that were not chosen, too.
    __device__ double of_softmax(float logit, double grad, int expert) const {
        float mine = -INFINITY;
#pragma unroll 1
        for (int i = lane; i < o.num_experts; i += 32) mine = fmaxf(mine, load_number(p.gate.logits, o.dtype, row + i));
        const double largest = warp_max(mine);
        double sum = 0.0;
#pragma unroll 1
        for (int i = lane; i < o.num_experts; i += 32) sum += exp_of_shifted(load_number(p.gate.logits, o.dtype, row + i), largest);
        const double factor = 1.0 / warp_sum(sum), prob = exp_of_shifted(logit, largest) * factor;
        const double of_prob = of_score(grad, prob, expert), dot = warp_sum(expert >= 0 ? of_prob * prob : 0.0);
#pragma unroll 1
        for (int i = lane; i < o.num_experts; i += 32) {
            const double other = exp_of_shifted(load_number(p.gate.logits, o.dtype, row + i), largest) * factor;
            store_number(p.gate.grad_logits, o.dtype, row + i, static_cast<float>(-dot * other));
        }
        return prob * (of_prob - dot);
    }
};

__global__ void __launch_bounds__(kThreads) gate_backward(const __grid_constant__ GpuGateBackwardParams p) {
    const int64_t token = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
    wait_for_kernel_before();
    if (token < p.gate.options.num_tokens) Gradient(p, token).run();
}

}  // namespace

void launch_gate_backward(const GpuGateBackwardParams& p, void* stream) {
    const int64_t blocks = divide_up(p.gate.options.num_tokens, kThreads / 32);
    if (blocks > 0) launch<gate_backward>("gate_backward", static_cast<int>(blocks), kThreads, 0, p, stream, can_start_early(stream));
}

}  // namespace deepep_moe

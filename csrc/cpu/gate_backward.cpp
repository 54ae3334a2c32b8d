// Gradient of the gate. The choice of experts is constant; scores are recomputed from the logits, which costs less memory traffic than
// saving them and, but for shares and kSoftmax, concerns the chosen experts only. Rounding to fp32 counts as the identity.
#include <algorithm>
#include <vector>

#include "cpu/parallel.h"
#include "cpu/gate.h"
#include "cpu/gate_scores.h"

namespace deepep_moe {
namespace {

// One token's lanes: those with an expert, in order.
struct Lanes {
    int count;
    int64_t experts[kMaxTopk];
    double grads[kMaxTopk];  // of the weights, times routed_scaling_factor
};

DEEPEP_MOE_INLINE void load_lanes(const GateBackwardParams& params, int64_t token, Lanes& lanes) {
    const GateOptions& o = params.options;
    lanes.count = 0;
    for (int k = 0; k < o.num_topk; ++k) {
        const int64_t position = token * o.num_topk + k, expert = load_index(params.topk_idx, o.index64, position);
        if (expert < 0 || expert >= o.num_experts) continue;
        lanes.experts[lanes.count] = expert;
        lanes.grads[lanes.count++] = params.grad_topk_weights ? params.grad_topk_weights[position] * o.routed_scaling_factor : 0.0;
    }
}

// From gradients of the weights w = s / (sum(s) + epsilon) to gradients of the scores s (in double, here rounded as in forward).
DEEPEP_MOE_INLINE void grad_scores(const double* scores, bool normalize, Lanes& lanes) {
    if (!normalize) return;
    double sum = 0.0, dot = 0.0;
    for (int k = 0; k < lanes.count; ++k) {
        const double score = static_cast<float>(scores[k]);
        sum += score;
        dot += lanes.grads[k] * score;
    }
    const double divisor = sum + kWeightEpsilon;
    for (int k = 0; k < lanes.count; ++k) lanes.grads[k] = (lanes.grads[k] - dot / divisor) / divisor;
}

DEEPEP_MOE_INLINE void grad_sigmoid(const GateOptions& o, const float* logits, Lanes& lanes, float* grad_row) {
    double scores[kMaxTopk];
    for (int k = 0; k < lanes.count; ++k) scores[k] = sigmoid(logits[lanes.experts[k]]);
    grad_scores(scores, o.normalize, lanes);
    std::fill_n(grad_row, o.num_experts, 0.0f);
    for (int k = 0; k < lanes.count; ++k) grad_row[lanes.experts[k]] = static_cast<float>(lanes.grads[k] * scores[k] * (1.0 - scores[k]));
}

DEEPEP_MOE_INLINE void grad_sqrt_softplus(const GateOptions& o, const float* logits, Lanes& lanes, float* grad_row) {
    double scores[kMaxTopk];
    for (int k = 0; k < lanes.count; ++k) scores[k] = sqrt_softplus(logits[lanes.experts[k]]);
    grad_scores(scores, o.normalize, lanes);
    std::fill_n(grad_row, o.num_experts, 0.0f);
    for (int k = 0; k < lanes.count; ++k)
        grad_row[lanes.experts[k]] = static_cast<float>(lanes.grads[k] * sqrt_softplus_slope(logits[lanes.experts[k]], scores[k]));
}

DEEPEP_MOE_INLINE void grad_softmax_topk(const GateOptions& o, const float* logits, const Lanes& lanes, float* grad_row) {
    float chosen[kMaxTopk];
    double probs[kMaxTopk], dot = 0.0;
    for (int k = 0; k < lanes.count; ++k) chosen[k] = logits[lanes.experts[k]];
    softmax_lanes(chosen, probs, lanes.count);
    for (int k = 0; k < lanes.count; ++k) dot += lanes.grads[k] * probs[k];
    std::fill_n(grad_row, o.num_experts, 0.0f);
    for (int k = 0; k < lanes.count; ++k) grad_row[lanes.experts[k]] = static_cast<float>(probs[k] * (lanes.grads[k] - dot));
}

DEEPEP_MOE_INLINE void grad_softmax(const GateOptions& o, const float* logits, Lanes& lanes, double* probs, float* grad_row) {
    double scores[kMaxTopk], dot = 0.0;
    softmax_row(logits, probs, o.num_experts);
    for (int k = 0; k < lanes.count; ++k) scores[k] = probs[lanes.experts[k]];
    grad_scores(scores, o.normalize, lanes);
    for (int k = 0; k < lanes.count; ++k) dot += lanes.grads[k] * scores[k];
    for (int i = 0; i < o.num_experts; ++i) grad_row[i] = static_cast<float>(-dot * probs[i]);
    for (int k = 0; k < lanes.count; ++k) grad_row[lanes.experts[k]] = static_cast<float>(scores[k] * (lanes.grads[k] - dot));
}

// What a row of gradients is made of.
struct RowState {
    explicit RowState(int num_experts) : logits(num_experts), grads(num_experts), values(num_experts), slopes(num_experts) {}

    std::vector<float> logits, grads;
    std::vector<double> values, slopes;  // of the function that shares are made of, and of its derivative
};

// Adds the gradient through the shares f(x) / sum(f), where f is the score or, of softmax functions, the exponential.
DEEPEP_MOE_INLINE void add_grad_shares(const GateOptions& o, const float* __restrict logits, const float* __restrict grad_shares,
                                       RowState& state) {
    const int n = o.num_experts;
    double* __restrict values = state.values.data();
    double* __restrict slopes = state.slopes.data();
    if (o.score_function == ScoreFunction::kSigmoid) {
        for (int i = 0; i < n; ++i) values[i] = sigmoid(logits[i]);
        for (int i = 0; i < n; ++i) slopes[i] = values[i] * (1.0 - values[i]);
    } else if (o.score_function == ScoreFunction::kSqrtSoftplus) {
        for (int i = 0; i < n; ++i) values[i] = sqrt_softplus(logits[i]);
        for (int i = 0; i < n; ++i) slopes[i] = sqrt_softplus_slope(logits[i], values[i]);
    } else {
        softmax_row(logits, values, n);  // is divided by the sum
        std::copy_n(values, n, slopes);
    }
    const bool is_softmax = o.score_function == ScoreFunction::kSoftmax || o.score_function == ScoreFunction::kSoftmaxTopk;
    const double divisor = is_softmax ? 1.0 : sum_of(n, [&](int i) { return values[i]; }) + kWeightEpsilon;
    const double mean = sum_of(n, [&](int i) { return grad_shares[i] * values[i]; }) / divisor;
    float* __restrict grads = state.grads.data();
    for (int i = 0; i < n; ++i) grads[i] += static_cast<float>((grad_shares[i] - mean) * slopes[i] / divisor);
}

template <class T>
DEEPEP_MOE_INLINE void store_row(const float* row, void* out, int64_t offset, int n) {
    for (int i = 0; i < n; ++i) static_cast<typename T::Storage*>(out)[offset + i] = T::store(row[i]);
}

DEEPEP_MOE_INLINE void store_grad(const GateBackwardParams& params, int64_t token, const float* row) {
    const int n = params.options.num_experts;
    switch (params.options.dtype) {
        case DType::kBFloat16: return store_row<BFloat16>(row, params.grad_logits, token * n, n);
        case DType::kFloat16: return store_row<Float16>(row, params.grad_logits, token * n, n);
        default: return store_row<Float32>(row, params.grad_logits, token * n, n);
    }
}

DEEPEP_MOE_CLONES
void backward_range(const GateBackwardParams& params, int64_t begin, int64_t end) {
    const GateOptions& o = params.options;
    RowState state(o.num_experts);
    float* const grad_row = state.grads.data();
    Lanes lanes;
    for (int64_t token = begin; token < end; ++token) {
        load_lanes(params, token, lanes);
        if (lanes.count == 0) {
            std::fill_n(grad_row, o.num_experts, 0.0f);
        } else {
            const float* logits = logits_row(params.logits, o.dtype, token, o.num_experts, state.logits.data());
            if (o.score_function == ScoreFunction::kSigmoid) grad_sigmoid(o, logits, lanes, grad_row);
            if (o.score_function == ScoreFunction::kSqrtSoftplus) grad_sqrt_softplus(o, logits, lanes, grad_row);
            if (o.score_function == ScoreFunction::kSoftmax) grad_softmax(o, logits, lanes, state.values.data(), grad_row);
            if (o.score_function == ScoreFunction::kSoftmaxTopk) grad_softmax_topk(o, logits, lanes, grad_row);
            if (params.grad_shares) add_grad_shares(o, logits, params.grad_shares + token * o.num_experts, state);
        }
        store_grad(params, token, grad_row);
    }
}

}  // namespace

void gate_backward(const GateBackwardParams& params) {
    const GateOptions& o = params.options;
    check_gate_options(o);
    const int count = num_ranges(o.num_tokens, kMinTokensPerThread, o.num_threads);
    parallel_ranges(o.num_tokens, count, [&](int, int64_t begin, int64_t end) { backward_range(params, begin, end); });
}

}  // namespace deepep_moe

// The gate and its gradients on several threads: equal to those on one.
#include "cpu/gate.h"

#include "ranks.h"

namespace deepep_moe {
namespace {

struct Outputs {
    std::vector<int64_t> experts;
    std::vector<float> weights, shares, grad_logits;
    std::vector<int32_t> counts;
    bool operator==(const Outputs&) const = default;
};

Outputs gate(GateOptions options, const std::vector<float>& logits, const std::vector<float>& bias) {
    const size_t num_lanes = options.num_tokens * options.num_topk;
    Outputs out{std::vector<int64_t>(num_lanes), std::vector<float>(num_lanes), std::vector<float>(logits.size()),
                std::vector<float>(logits.size()), std::vector<int32_t>(options.num_experts)};
    gate_forward(
        {options, logits.data(), bias.data(), nullptr, out.experts.data(), out.weights.data(), out.counts.data(), out.shares.data()});
    gate_backward({options, logits.data(), out.experts.data(), out.weights.data(), out.shares.data(), out.grad_logits.data()});
    return out;
}

}  // namespace

void run_gate() {
    for (const ScoreFunction score_function : {ScoreFunction::kSigmoid, ScoreFunction::kSoftmax, ScoreFunction::kSoftmaxTopk}) {
        GateOptions options{6000, 32, 4, 4, 2, 2, score_function, true, 2.5, DType::kFloat32, true, 1};
        std::vector<float> logits(options.num_tokens * options.num_experts), bias(options.num_experts);
        for (size_t i = 0; i < logits.size(); ++i) logits[i] = static_cast<float>(i * 7919 % 1009) / 100.0f - 5.0f;
        for (size_t i = 0; i < bias.size(); ++i) bias[i] = static_cast<float>(i % 5) / 10.0f;
        const Outputs wanted = gate(options, logits, bias);
        int64_t num_chosen = 0;
        for (const int32_t count : wanted.counts) num_chosen += count;
        require(num_chosen == options.num_tokens * options.num_topk, "each token has its experts");
        options.num_threads = 4;
        require(gate(options, logits, bias) == wanted, "a gate on four threads");
    }
}

}  // namespace deepep_moe

// Gate of a mixture-of-experts layer on the CPU: scores, group-limited top-k, weights, counts; and its gradient.
//
// Defined exactly, so that every implementation agrees bit for bit (deepep_moe/reference/gate.py is the definition):
//   scores      the score function in double precision, rounded once to fp32 (kSoftmaxTopk: the logits themselves)
//   selection   score + expert_bias in fp32; the larger wins, among equals the lower expert index
//   groups      score of a group: fp32 sum of its group_score_topk largest selection scores, largest first; the topk_groups best
//               groups stay, among equals the lower index; experts of the others cannot be chosen
//   weights     in double from the chosen fp32 scores w: w / (sum + 1e-20) if normalize (kSoftmaxTopk: softmax over the chosen),
//               times routed_scaling_factor, rounded once to fp32; sums run over lanes in order
#pragma once

#include <cstdint>

#include "common/types.h"

namespace deepep_moe {

enum class ScoreFunction {
    kSigmoid,
    kSoftmax,      // over all experts, before the choice
    kSoftmaxTopk,  // over the chosen experts, after the choice
};

struct GateOptions {
    int64_t num_tokens;
    int num_experts;
    int num_topk;            // 1 ... min(kMaxTopk, num_experts)
    int num_groups;          // divides num_experts
    int topk_groups;         // 1 ... num_groups, with at least num_topk experts together
    int group_score_topk;    // 1 ... num_experts / num_groups; unused if all groups stay
    ScoreFunction score_function;
    bool normalize;
    double routed_scaling_factor;
    DType dtype;             // of logits and grad_logits: kFloat32, kBFloat16 or kFloat16
    bool index64;            // topk_idx is int64, otherwise int32
    int num_threads;         // at most this many, fewer for few tokens
};

struct GateParams {
    GateOptions options;
    const void* logits;              // [num_tokens, num_experts] dtype; rows of masked tokens are not read
    const float* expert_bias;        // [num_experts] or null
    const bool* mask;                // [num_tokens] or null; true: the token chooses no expert (index -1, weight 0)
    void* topk_idx;                  // [num_tokens, num_topk], by descending selection score
    float* topk_weights;             // [num_tokens, num_topk]
    int32_t* num_tokens_per_expert;  // [num_experts]
};

struct GateBackwardParams {
    GateOptions options;
    const void* logits;               // [num_tokens, num_experts] dtype
    const void* topk_idx;             // [num_tokens, num_topk]; rows of -1 get a zero gradient
    const float* grad_topk_weights;   // [num_tokens, num_topk]
    void* grad_logits;                // [num_tokens, num_experts] dtype
};

// Throws std::invalid_argument for options out of bounds, a non-finite bias, or a non-finite logit (naming token and expert).
void gate_forward(const GateParams& params);

// Throws std::invalid_argument for options out of bounds.
void gate_backward(const GateBackwardParams& params);

}  // namespace deepep_moe

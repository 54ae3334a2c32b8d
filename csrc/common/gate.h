// Defines the gate of a mixture-of-experts layer and its gradient: scores, group-limited top-k, weights, counts.
//
// The definition is exact, so that every implementation agrees bit for bit (deepep_moe/reference/gate.py is the reference).
//
//   Scores      The score function in double precision, rounded once to fp32. With kSoftmaxTopk, scores are the logits themselves.
//   Selection   score + expert_bias in fp32. The larger wins, among equals the lower expert index. NaN is greater than all.
//   Groups      A group's score is the fp32 sum of its group_score_topk largest selection scores, largest first. The topk_groups best
//               groups stay, among equals the lower index. Experts of the others cannot be chosen.
//
//   Weights     In double from the chosen fp32 scores w: w / (sum + 1e-20) if normalize (kSoftmaxTopk: softmax over the chosen).
//               Then times routed_scaling_factor, rounded once to fp32. Sums run over top-k entries in order.
//   Shares      In double from all fp32 scores s: s / (sum + 1e-20), rounded once to fp32, the sum in any order. With both softmax
//               functions, shares are the softmax over all experts.
#pragma once

#include <cstdint>

#include "common/types.h"

namespace deepep_moe {

constexpr double kWeightEpsilon = 1e-20;

enum class ScoreFunction {
    kSigmoid,
    kSqrtSoftplus,  // sqrt(log(1 + exp(x)))
    kSoftmax,       // over all experts, before the choice
    kSoftmaxTopk,   // over the chosen experts, after the choice
};

struct GateOptions {
    int64_t num_tokens;
    int num_experts;
    int num_topk;          // 1 ... min(kMaxTopk, num_experts)
    int num_groups;        // divides num_experts
    int topk_groups;       // 1 ... num_groups, with at least num_topk experts together
    int group_score_topk;  // 1 ... num_experts / num_groups; unused if all groups stay
    ScoreFunction score_function;
    bool normalize;
    double routed_scaling_factor;
    DType dtype;               // type of logits and grad_logits: kFloat32, kBFloat16 or kFloat16
    bool index64;              // topk_idx is int64, otherwise int32
    bool check_finite = true;  // a logit that is not finite is an error; else it goes through the arithmetic above as any other
};

constexpr int kMaxGateExperts = 1024;

// If wanted, the kernel also writes the token's experts as a dense row, and the ranks it goes to.
struct GpuGateParams {
    GateOptions options;
    const void* logits;              // [num_tokens, num_experts] dtype; rows of masked tokens have no effect
    const float* expert_bias;        // [num_experts] or null
    const bool* mask;                // [num_tokens] or null; a token with true chooses no expert (index -1, weight 0)
    void* topk_idx;                  // [num_tokens, num_topk], by descending selection score
    float* topk_weights;             // [num_tokens, num_topk]
    int32_t* num_tokens_per_expert;  // [num_experts + num_ranks], zeros before; the rest is num_tokens_per_rank
    float* shares;                   // [num_tokens, num_experts], 0 in rows of tokens that choose no expert; or null
    float* probs;                    // [num_tokens, num_experts] weights, 0 where not chosen; or null
    bool* routing_map;               // [num_tokens, num_experts], with probs
    int num_ranks;                   // divides num_experts; 0: no layout
    bool* is_token_in_rank;          // [num_tokens, num_ranks], or null
    int32_t* next_counts;            // [num_experts + num_ranks] to be zeroed, for the next launch; or null
    unsigned long long* failure;     // host memory; the last non-finite number found, as below
    int device;                      // the device whose failures are checked before
};

struct GpuGateBackwardParams {
    GateOptions options;
    const void* logits;              // [num_tokens, num_experts] dtype
    const void* topk_idx;            // [num_tokens, num_topk]; rows of -1 get a zero gradient
    const float* grad_topk_weights;  // [num_tokens, num_topk], or null
    const float* grad_shares;        // [num_tokens, num_experts], or null
    void* grad_logits;               // [num_tokens, num_experts] dtype
    const float* grad_probs;         // [num_tokens, num_experts], or null
    int device;                      // the device whose failures are checked before
};

// Returns whether kernels can run with these options without reading or writing outside their arrays. Callers that want clear messages
// check before.
inline bool are_valid_on_gpu(const GateOptions& o, int num_ranks) {
    const int group_size = o.num_groups >= 1 ? o.num_experts / o.num_groups : 0;
    return element_bytes(o.dtype) >= 2 && o.num_tokens >= 0 && o.num_topk >= 1 && o.num_topk <= kMaxTopk && o.num_topk <= o.num_experts &&
           group_size >= 1 && o.num_experts % o.num_groups == 0 && o.topk_groups >= 1 && o.topk_groups <= o.num_groups &&
           int64_t{group_size} * o.topk_groups >= o.num_topk &&
           (o.topk_groups == o.num_groups || (o.group_score_topk >= 1 && o.group_score_topk <= group_size)) &&
           o.num_experts <= kMaxGateExperts && num_ranks >= 0 && (num_ranks == 0 || o.num_experts % num_ranks == 0);
}

// This is top-2 gating with a capacity, of GShard (arXiv 2006.16668), in fp32, as DeepSpeed computes it. A token chooses its best expert by
// `gates` and the best other one by `scores`. An expert takes `capacity` tokens, first choices before second ones, each in token order.
// Weights are the gates of the choices that stay, over their sum, or over FLT_EPSILON if the sum is less. Among equals the lower index
// wins. NaN is greater than all.
struct GpuTop2Params {
    int64_t num_tokens, capacity;
    int num_experts;
    const float* gates;   // [num_tokens, num_experts]
    const float* scores;  // [num_tokens, num_experts]
    int32_t* chosen;      // [2, num_tokens]
    int32_t* topk_idx;    // [2, num_tokens]: the chosen that stay, else -1
    float* topk_weights;  // [2, num_tokens]
    float* is_first;      // [num_tokens, num_experts]: 1 at first choices, else 0
    int64_t* counts;      // [num_experts], of all choices
};

// The backward computes gradients of the gates from those of the weights and of the loss num_experts * sum over experts of mean(gates) *
// mean(is_first).
struct GpuTop2BackwardParams {
    int64_t num_tokens;
    int num_experts;
    const float* gates;       // [num_tokens, num_experts]
    const int32_t* chosen;    // [2, num_tokens]
    const int32_t* topk_idx;  // [2, num_tokens]
    const float* grad;        // [2, num_tokens] of the weights, or nullptr
    const float* grad_loss;   // one number, or nullptr
    const float* load;        // [num_experts], mean(is_first)
    float* grad_gates;        // [num_tokens, num_experts]
};

// The gate reports a non-finite number in one word, so that it is read at once: token << 16 | what << 12 | expert.
enum class GateFailure : int { kNone = 0, kNan, kInf, kMinusInf, kBias = 4 };  // kBias is added if the number was a bias
constexpr int kFailureTokenShift = 16, kFailureWhatShift = 12;

}  // namespace deepep_moe

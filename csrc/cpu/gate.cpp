#include "cpu/gate.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "cpu/parallel.h"
#include "cpu/gate_scores.h"

namespace deepep_moe {
namespace {

// A selection score and the index it belongs to as one integer: the larger is the better choice, equal scores by lower index.
DEEPEP_MOE_INLINE int64_t key_of(float score, int index) {
    return (static_cast<int64_t>(ordered_bits(score)) << 32) | (0xffffffffu - static_cast<uint32_t>(index));
}

DEEPEP_MOE_INLINE int index_of(int64_t key) { return static_cast<int>(0xffffffffu - static_cast<uint32_t>(key)); }

DEEPEP_MOE_INLINE float score_of(int64_t key) { return from_ordered_bits(static_cast<int32_t>(key >> 32)); }

// NaN of any sign as the one that is greater than all.
DEEPEP_MOE_INLINE float with_one_nan(float x) { return x == x ? x : std::numeric_limits<float>::quiet_NaN(); }

constexpr int64_t kBest = std::numeric_limits<int64_t>::max(), kWorst = std::numeric_limits<int64_t>::min();

// The best key that is worse than `bound`. Choosing by falling bounds leaves the keys as they are. Compilers do not vectorize this
// reduction by themselves, so it is spelled out on the compiler's vector type, which lowers to the instructions of each clone.
DEEPEP_MOE_INLINE int64_t best_below(const int64_t* keys, int n, int64_t bound) {
    using Vector = int64_t __attribute__((vector_size(DEEPEP_MOE_VECTOR_BYTES)));
    constexpr int kLanes = sizeof(Vector) / sizeof(int64_t);
    const Vector bounds = bound - Vector{}, worst = kWorst - Vector{};
    Vector bests = worst;
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        Vector candidates;
        std::memcpy(&candidates, keys + i, sizeof(candidates));
        candidates = candidates < bounds ? candidates : worst;
        bests = candidates > bests ? candidates : bests;
    }
    int64_t best = kWorst;
    for (int lane = 0; lane < kLanes; ++lane) best = bests[lane] > best ? bests[lane] : best;
    for (; i < n; ++i) best = keys[i] < bound && keys[i] > best ? keys[i] : best;
    return best;
}

// What one thread needs and finds.
struct RangeState {
    explicit RangeState(const GateOptions& o)
        : logits(o.num_experts),
          scores(o.num_experts),
          probs(o.num_experts),
          keys(o.num_experts),
          group_keys(o.num_groups),
          chosen_groups(o.topk_groups),
          counts(o.num_experts) {}

    std::vector<float> logits, scores;  // [num_experts]
    std::vector<double> probs;          // [num_experts]
    std::vector<int64_t> keys;          // [num_experts]; of the chosen groups' experts only after limit_groups
    std::vector<int64_t> group_keys;    // [num_groups]
    std::vector<int> chosen_groups;     // [topk_groups]
    std::vector<int32_t> counts;        // [num_experts] tokens that chose the expert
    int64_t bad_token = -1;             // first token with a non-finite logit
};

DEEPEP_MOE_INLINE bool all_finite(const float* values, int n) {
    uint32_t bad = 0;
    for (int i = 0; i < n; ++i) bad |= (std::bit_cast<uint32_t>(values[i]) & 0x7f800000u) == 0x7f800000u;
    return bad == 0;
}

DEEPEP_MOE_INLINE void score_row(ScoreFunction function, const float* __restrict logits, double* __restrict probs, float* __restrict scores,
                                 int n) {
    switch (function) {
        case ScoreFunction::kSigmoid:
            for (int i = 0; i < n; ++i) scores[i] = static_cast<float>(sigmoid(logits[i]));
            break;
        case ScoreFunction::kSqrtSoftplus:
            for (int i = 0; i < n; ++i) scores[i] = static_cast<float>(sqrt_softplus(logits[i]));
            break;
        case ScoreFunction::kSoftmax:
            softmax_row(logits, probs, n);
            for (int i = 0; i < n; ++i) scores[i] = static_cast<float>(probs[i]);
            break;
        case ScoreFunction::kSoftmaxTopk: std::copy_n(logits, n, scores); break;
    }
}

// Moves the keys of the experts in the topk_groups best groups to the front of `keys`; returns how many they are.
DEEPEP_MOE_INLINE int limit_groups(const GateOptions& o, RangeState& state) {
    const int group_size = o.num_experts / o.num_groups;
    int64_t *keys = state.keys.data(), *group_keys = state.group_keys.data();
    for (int group = 0; group < o.num_groups; ++group) {
        float sum = 0.0f;
        int64_t key = kBest;
        for (int n = 0; n < o.group_score_topk; ++n) {
            key = best_below(keys + group * group_size, group_size, key);
            sum += score_of(key);
        }
        group_keys[group] = key_of(with_one_nan(sum), group);
    }
    int* chosen = state.chosen_groups.data();
    int64_t key = kBest;
    for (int g = 0; g < o.topk_groups; ++g) {
        key = best_below(group_keys, o.num_groups, key);
        chosen[g] = index_of(key);
    }
    std::sort(chosen, chosen + o.topk_groups);
    for (int g = 0; g < o.topk_groups; ++g) std::copy_n(keys + chosen[g] * group_size, group_size, keys + g * group_size);
    return o.topk_groups * group_size;
}

// The token's experts, by descending selection score.
DEEPEP_MOE_INLINE void choose_experts(const GateOptions& o, const float* bias, RangeState& state, int* experts) {
    const float* scores = state.scores.data();
    int64_t* keys = state.keys.data();
    for (int i = 0; i < o.num_experts; ++i) keys[i] = key_of(bias ? scores[i] + bias[i] : scores[i], i);
    const int num_candidates = o.topk_groups == o.num_groups ? o.num_experts : limit_groups(o, state);
    int64_t key = kBest;
    for (int k = 0; k < o.num_topk; ++k) {
        key = best_below(keys, num_candidates, key);
        experts[k] = index_of(key);
    }
}

DEEPEP_MOE_INLINE void weigh_experts(const GateOptions& o, const float* scores, const int* experts, float* weights) {
    float chosen[kMaxTopk];
    double values[kMaxTopk];
    for (int k = 0; k < o.num_topk; ++k) chosen[k] = scores[experts[k]];
    if (o.score_function == ScoreFunction::kSoftmaxTopk) {
        softmax_lanes(chosen, values, o.num_topk);
    } else {
        double sum = 0.0;
        for (int k = 0; k < o.num_topk; ++k) sum += chosen[k];
        const double divisor = o.normalize ? sum + kWeightEpsilon : 1.0;
        for (int k = 0; k < o.num_topk; ++k) values[k] = chosen[k] / divisor;
    }
    for (int k = 0; k < o.num_topk; ++k) weights[k] = static_cast<float>(values[k] * o.routed_scaling_factor);
}

// All experts' shares, from the token's scores.
DEEPEP_MOE_INLINE void share_row(ScoreFunction function, const float* __restrict scores, double* __restrict values,
                                 float* __restrict shares, int n) {
    if (function == ScoreFunction::kSoftmax) {
        std::copy_n(scores, n, shares);
    } else if (function == ScoreFunction::kSoftmaxTopk) {
        softmax_row(scores, values, n);
        for (int i = 0; i < n; ++i) shares[i] = static_cast<float>(values[i]);
    } else {
        const double divisor = sum_of(n, [&](int i) { return static_cast<double>(scores[i]); }) + kWeightEpsilon;
        for (int i = 0; i < n; ++i) shares[i] = static_cast<float>(scores[i] / divisor);
    }
}

DEEPEP_MOE_CLONES
void gate_range(const GateParams& params, int64_t begin, int64_t end, RangeState& state) {
    const GateOptions& o = params.options;
    int experts[kMaxTopk];
    for (int64_t token = begin; token < end; ++token) {
        const int64_t row = token * o.num_topk;
        if (params.mask && params.mask[token]) {
            for (int k = 0; k < o.num_topk; ++k) store_index(params.topk_idx, o.index64, row + k, -1);
            std::fill_n(params.topk_weights + row, o.num_topk, 0.0f);
            if (params.shares) std::fill_n(params.shares + token * o.num_experts, o.num_experts, 0.0f);
            continue;
        }
        const float* logits = logits_row(params.logits, o.dtype, token, o.num_experts, state.logits.data());
        const bool is_finite = all_finite(logits, o.num_experts);
        if (!is_finite && o.check_finite) {
            state.bad_token = token;
            return;
        }
        score_row(o.score_function, logits, state.probs.data(), state.scores.data(), o.num_experts);
        for (int i = 0; !is_finite && i < o.num_experts; ++i) state.scores[i] = with_one_nan(state.scores[i]);
        choose_experts(o, params.expert_bias, state, experts);
        weigh_experts(o, state.scores.data(), experts, params.topk_weights + row);
        for (int k = 0; k < o.num_topk; ++k) {
            store_index(params.topk_idx, o.index64, row + k, experts[k]);
            ++state.counts[experts[k]];
        }
        float* const shares = params.shares ? params.shares + token * o.num_experts : nullptr;
        if (shares) share_row(o.score_function, state.scores.data(), state.probs.data(), shares, o.num_experts);
    }
}

[[noreturn]] void throw_bad_logit(const GateParams& params, int64_t token) {
    const GateOptions& o = params.options;
    std::vector<float> buffer(o.num_experts);
    const float* logits = logits_row(params.logits, o.dtype, token, o.num_experts, buffer.data());
    const int64_t expert = std::find_if(logits, logits + o.num_experts, [](float x) { return !std::isfinite(x); }) - logits;
    throw std::invalid_argument("logits has " + std::to_string(logits[expert]) + " for token " + std::to_string(token) + ", expert " +
                                std::to_string(expert) + "; it must be finite: look for an overflow before the router, or mask the token");
}

void check_bias(const GateParams& params) {
    const float* bias = params.expert_bias;
    for (int i = 0; bias && i < params.options.num_experts; ++i) {
        if (!std::isfinite(bias[i])) {
            throw std::invalid_argument("expert_bias has " + std::to_string(bias[i]) + " for expert " + std::to_string(i) +
                                        "; it must be finite");
        }
    }
}

}  // namespace

void gate_forward(const GateParams& params) {
    const GateOptions& o = params.options;
    check_gate_options(o);
    check_bias(params);
    const int count = num_ranges(o.num_tokens, kMinTokensPerThread, o.num_threads);
    std::vector<RangeState> states(count, RangeState(o));
    parallel_ranges(o.num_tokens, count, [&](int range, int64_t begin, int64_t end) { gate_range(params, begin, end, states[range]); });
    for (const RangeState& state : states) {
        if (state.bad_token >= 0) throw_bad_logit(params, state.bad_token);
    }
    std::fill_n(params.num_tokens_per_expert, o.num_experts, 0);
    for (const RangeState& state : states) {
        for (int i = 0; i < o.num_experts; ++i) params.num_tokens_per_expert[i] += state.counts[i];
    }
}

}  // namespace deepep_moe

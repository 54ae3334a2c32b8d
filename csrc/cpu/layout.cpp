#include "cpu/layout.h"

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <string>

#include "common/errors.h"

namespace deepep_moe {
namespace {

[[noreturn]] void refuse(int64_t token, int lane, int64_t expert, int num_experts) {
    throw NoExpertError("topk_idx[" + std::to_string(token) + ", " + std::to_string(lane) + "] is " + std::to_string(expert) +
                        "; it must be -1 (no expert) or 0 to " + std::to_string(num_experts - 1));
}

[[noreturn]] void refuse_duplicate(int64_t token, int first, int second, int64_t expert) {
    throw std::invalid_argument("topk_idx[" + std::to_string(token) + "] names expert " + std::to_string(expert) + " twice, in lanes " +
                                std::to_string(first) + " and " + std::to_string(second) + "; a token may choose an expert once");
}

template <class Index>
void count(const WorkspaceConfig& c, const LayoutParams& p, Range range, const ChannelCounts& counts) {
    const auto* topk_idx = static_cast<const Index*>(p.topk_idx);
    const int experts_per_rank = c.num_experts / c.num_ranks;
    for (int64_t token = range.begin; token < range.end; ++token) {
        const Index* lanes = topk_idx + token * c.num_topk;
        uint64_t ranks = 0;
        for (int k = 0; k < c.num_topk; ++k) {
            const int64_t expert = lanes[k];
            if (expert < -1 || expert >= c.num_experts) refuse(token, k, expert, c.num_experts);
            p.narrow_topk_idx[token * c.num_topk + k] = static_cast<int32_t>(expert);
            if (expert < 0) continue;
            for (int other = 0; other < k; ++other)
                if (lanes[other] == expert) refuse_duplicate(token, other, k, expert);
            ++counts.num_tokens_per_expert[expert];
            ranks |= uint64_t{1} << (expert / experts_per_rank);
        }
        for (; ranks != 0; ranks &= ranks - 1) ++counts.num_tokens_per_rank[std::countr_zero(ranks)];
    }
}

}  // namespace

void count_tokens(const WorkspaceConfig& config, const LayoutParams& params, Range range, const ChannelCounts& counts) {
    std::fill_n(counts.num_tokens_per_rank, config.num_ranks, 0);
    std::fill_n(counts.num_tokens_per_expert, config.num_experts, 0);
    return params.is_int64 ? count<int64_t>(config, params, range, counts) : count<int32_t>(config, params, range, counts);
}

}  // namespace deepep_moe

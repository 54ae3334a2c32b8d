#include "cpu/dense_routing.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

namespace deepep_moe {
namespace {

// Call `visit` with each chosen expert, ascending. Most experts are not chosen, so eight are checked together.
template <class Visit>
void for_each_chosen(const uint8_t* row, int64_t num_experts, const Visit& visit) {
    int64_t expert = 0;
    for (; expert + 8 <= num_experts; expert += 8) {
        uint64_t word;
        std::memcpy(&word, row + expert, sizeof(word));
        if constexpr (std::endian::native == std::endian::big) word = __builtin_bswap64(word);
        for (; word != 0; word &= word - 1) visit(expert + std::countr_zero(word) / 8);
    }
    for (; expert < num_experts; ++expert)
        if (row[expert] != 0) visit(expert);
}

template <class Index>
void count_lanes_of(const CountLanesParams& p) {
    const auto [num_tokens, num_experts, num_topk] = p.sizes;
    const int64_t num_local = num_experts / p.num_ranks;
    const Index* const topk_idx = static_cast<const Index*>(p.topk_idx);
    std::vector<int64_t> last_tokens(num_experts, -1);  // the last token that each expert has counted
    for (int64_t token = 0; token < num_tokens; ++token) {
        uint8_t* const in_rank = p.is_token_in_rank + token * p.num_ranks;
        std::fill_n(in_rank, p.num_ranks, uint8_t{0});
        for (int64_t lane = 0; lane < num_topk; ++lane) {
            const int64_t expert = topk_idx[token * num_topk + lane];
            if (expert < 0 || expert >= num_experts || last_tokens[expert] == token) continue;
            last_tokens[expert] = token;
            ++p.counts[p.num_ranks + expert];
            const int64_t rank = expert / num_local;
            if (in_rank[rank] == 0) ++p.counts[rank];
            in_rank[rank] = 1;
        }
    }
}

}  // namespace

void count_lanes(const CountLanesParams& p) { p.is_int64 ? count_lanes_of<int64_t>(p) : count_lanes_of<int32_t>(p); }

void lanes_of_map(const LanesOfMapParams& p) {
    const auto [num_tokens, num_experts, num_topk] = p.sizes;
    for (int64_t token = 0; token < num_tokens; ++token) {
        int64_t* const lanes = p.topk_idx + token * num_topk;
        float* const weights = p.topk_values == nullptr ? nullptr : p.topk_values + token * num_topk;
        int64_t count = 0;
        for_each_chosen(p.routing_map + token * num_experts, num_experts, [&](int64_t expert) {
            if (count < num_topk) {
                lanes[count] = expert;
                if (weights != nullptr) weights[count] = p.values[token * num_experts + expert];
            }
            ++count;
        });
        if (count > num_topk && num_topk > 0) lanes[0] = num_experts;
        for (int64_t lane = std::min(count, num_topk); lane < num_topk; ++lane) {
            lanes[lane] = -1;
            if (weights != nullptr) weights[lane] = 0;
        }
    }
}

void dense_of_lanes(const DenseOfLanesParams& p) {
    const auto [num_tokens, num_experts, num_topk] = p.sizes;
    std::fill_n(p.values, num_tokens * num_experts, 0.0f);
    for (int64_t token = 0; token < num_tokens; ++token)
        for (int64_t lane = 0; lane < num_topk; ++lane) {
            const int64_t expert = p.topk_idx[token * num_topk + lane];
            if (expert >= 0 && expert < num_experts) p.values[token * num_experts + expert] = p.topk_values[token * num_topk + lane];
        }
}

}  // namespace deepep_moe

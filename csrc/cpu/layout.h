// Counts a rank's tokens for each rank and each expert.
#pragma once

#include <cstdint>

#include "cpu/workspace.h"

namespace deepep_moe {

struct LayoutParams {
    const void* topk_idx;  // [num_tokens, num_topk] int64 or int32, -1 = no expert
    bool is_int64;
    int64_t num_tokens;
    int32_t* narrow_topk_idx;  // [num_tokens, num_topk] out
};

struct ChannelCounts {
    int32_t* num_tokens_per_rank;    // [num_ranks] out: tokens of the channel with an expert on the rank
    int32_t* num_tokens_per_expert;  // [num_experts] out
};

// Counts the tokens of `range`. Throws std::invalid_argument for an index outside [-1, num_experts) or an expert twice in a row.
void count_tokens(const WorkspaceConfig& config, const LayoutParams& params, Range range, const ChannelCounts& counts);

}  // namespace deepep_moe

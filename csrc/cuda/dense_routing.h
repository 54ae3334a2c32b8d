// Declares dense routing on GPUs: a map of chosen experts, with a number for each, becomes top-k entries, and back; these are counted.
#pragma once

#include <cstdint>

namespace deepep_moe {

struct DenseRouting {
    int64_t num_tokens;
    int64_t num_experts, num_topk;
};

// Write a token's experts, ascending, then -1. If it has more than num_topk, the first entry is num_experts, which dispatches refuse.
struct LanesOfMapParams {
    DenseRouting sizes;
    const uint8_t* routing_map;  // [num_tokens, num_experts] bool
    const float* values;         // [num_tokens, num_experts], or nullptr
    int64_t* topk_idx;           // [num_tokens, num_topk], out
    float* topk_values;          // [num_tokens, num_topk], out, with `values`: 0 in entries without an expert
};

// Write the value of each top-k entry in the column of its expert, and 0 elsewhere.
struct DenseOfLanesParams {
    DenseRouting sizes;
    const int64_t* topk_idx;   // [num_tokens, num_topk], -1 = no expert
    const float* topk_values;  // [num_tokens, num_topk]
    float* values;             // [num_tokens, num_experts], out
};

// Count the tokens of each rank and each expert, each token once, and write to which ranks it goes. Entries without expert do not count.
struct CountLanesParams {
    DenseRouting sizes;
    int64_t num_ranks;
    const void* topk_idx;  // [num_tokens, num_topk] int64, or int32
    bool is_int64;
    int32_t* counts;            // [num_ranks + num_experts], zeroed by the caller; out: of each rank, then of each expert
    uint8_t* is_token_in_rank;  // [num_tokens, num_ranks] bool, out
};

}  // namespace deepep_moe

// A combine sums a token's rows on each rank, sends the sum back once per rank, and adds these sums at the source in rank order.
#pragma once

#include "common/combine_options.h"
#include "cpu/channel.h"

namespace deepep_moe {

struct CombineParams {
    DType dtype;
    Layout layout;

    // These are about the tokens that this rank received.
    const int32_t* recv_counts;   // [num_ranks, num_channels]
    const int32_t* recv_row_idx;  // expert layout: [num_recv_tokens, num_topk] row of each top-k entry, -1 = none; nullptr in rank layout
    const std::byte* x;           // [num_rows, hidden] (rank layout: num_rows = num_recv_tokens)
    const float* weights;         // [num_rows], or nullptr: a plain sum
    const float* topk_weight_grads;  // expert layout: [num_rows]; rank layout: [num_recv_tokens, num_topk]; or nullptr

    // These are about this rank's own tokens.
    int64_t num_tokens;
    const int32_t* topk_idx;            // [num_tokens, num_topk]
    const std::byte* bias;              // [num_tokens, hidden], or nullptr
    std::byte* combined_x;              // [num_tokens, hidden]
    float* combined_topk_weight_grads;  // [num_tokens, num_topk], or nullptr
    CombineOptions options;
};

// Moves the rows of one channel. Throws what `channel.monitor` throws.
void move_channel(const CombineParams& params, const Channel& channel);

}  // namespace deepep_moe

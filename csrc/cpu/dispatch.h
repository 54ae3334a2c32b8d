// A dispatch sends every token once to every rank that holds one of its experts, which expands it into its rows.
#pragma once

#include "cpu/channel.h"

namespace deepep_moe {

// Larger outputs are written past the caches, which could not hold them anyway.
constexpr int64_t kStreamingBytes = 8 << 20;

struct DispatchParams {
    Layout layout;
    bool cached;     // rows go where recv_row_idx says; otherwise it is written
    bool streaming;  // write recv_x past the caches
    size_t row_bytes, scale_bytes;

    // These are about this rank's tokens.
    int64_t num_tokens;
    const std::byte* x;         // [num_tokens, row_bytes]
    const std::byte* x_scales;  // [num_tokens, scale_bytes], or nullptr
    const int32_t* topk_idx;    // [num_tokens, num_topk]
    const float* topk_weights;  // [num_tokens, num_topk], or nullptr

    // These are about the tokens that this rank receives.
    const int32_t* recv_counts;          // [num_ranks, num_channels]
    const int32_t* row_begin = nullptr;  // [num_ranks, num_channels, num_local_experts] first row of each run (expert layout, not cached)
    std::byte* recv_x;                   // [num_rows, row_bytes]
    std::byte* recv_x_scales;            // [num_rows, scale_bytes], or nullptr
    void* recv_topk_idx;                 // rank layout: [num_recv_tokens, num_topk] local experts, or nullptr (cached)
    bool recv_topk_idx_is_int64;
    float* recv_topk_weights;  // rank layout: [num_recv_tokens, num_topk]; expert layout: [num_rows]; or nullptr
    int32_t* recv_row_idx;     // expert layout: [num_recv_tokens, num_topk] row of each top-k entry, -1 = none
};

// Moves the rows of one channel. Throws what `channel.monitor` throws.
void move_channel(const DispatchParams& params, const Channel& channel);

}  // namespace deepep_moe

// Finds where the rows of a received token go, and writes them and their scales with a warp.
#pragma once

#include "cuda/device/low_latency_lines.cuh"

namespace deepep_moe {

// Holds offsets of a token's rows: bytes in recv_x, words in recv_x_scales.
struct TokenRows {
    int num;
    bool is_here;  // the row is known to have come
    int64_t rows[kMaxTopk], scales[kMaxTopk];
};

// Returns the words of one row's scales, each of which holds one fp32 scale or four rounded exponents.
__device__ __forceinline__ int64_t num_scale_words(const LowLatencyConfig& config, bool is_rounded) {
    const int num_scales = config.hidden / kScaleBlock;
    return is_rounded ? (num_scales + 3) / 4 : num_scales;
}

__device__ __forceinline__ void write_piece(const LowLatencyDispatchParams& p, const TokenRows& rows, int piece, const uint4& part) {
    uint4* const to = pieces(p.recv_x) + piece;
#pragma unroll 1
    for (int n = 0; n < rows.num; ++n) *reinterpret_cast<uint4*>(reinterpret_cast<std::byte*>(to) + rows.rows[n]) = part;
}

// Write one exponent. The last one of a row also zeros the rest of its word.
__device__ __forceinline__ void write_exponent(uint8_t* word, int block, int num_scales, float scale) {
    word[block % 4] = static_cast<uint8_t>(__float_as_uint(scale) >> 23);
    for (int rest = block + 1; block == num_scales - 1 && rest % 4 != 0; ++rest) word[rest % 4] = 0;
}

// Write the scale of one block of columns of the n-th row. Scales are column-major, so those of one column of blocks lie together.
__device__ __forceinline__ void write_scale(const LowLatencyDispatchParams& p, const LowLatencyConfig& config, const TokenRows& rows, int n,
                                            int block, float scale) {
    uint32_t* const first = static_cast<uint32_t*>(p.recv_x_scales) + rows.scales[n];
    if (p.what.is_rounded)
        write_exponent(reinterpret_cast<uint8_t*>(first + block / 4 * config.rows_of_expert()), block, config.hidden / kScaleBlock, scale);
    else
        first[block * config.rows_of_expert()] = __float_as_uint(scale);
}

// Write the scale of the block that begins in the line of `first_piece`, if one does. Each thread of the warp takes some rows.
__device__ __forceinline__ void write_scales(const LowLatencyDispatchParams& p, const LowLatencyConfig& config, const TokenRows& rows,
                                             int lane, int first_piece, const uint4& part) {
    const int num_scales = config.hidden / kScaleBlock, block = (first_piece + kPiecesOfBlock - 1) / kPiecesOfBlock,
              end = lane | kLinePieces;
    const float scale =
        scale_of(block * kPiecesOfBlock, make_uint4(__shfl_sync(kFullWarp, part.x, end), __shfl_sync(kFullWarp, part.y, end), 0, 0));
    if (block * kPiecesOfBlock >= first_piece + kLinePieces || block >= num_scales) return;
#pragma unroll 1
    for (int n = lane % kPartsOfLine; n < rows.num; n += kPartsOfLine) write_scale(p, config, rows, n, block, scale);
}

}  // namespace deepep_moe

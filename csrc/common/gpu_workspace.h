// Layout of one rank's workspace in GPU memory, which its peers map and write. Every offset into it comes from here.
//
//   entered u64[num_ranks] | refused u64[num_ranks] | counts_ready u64[num_ranks] | arrived u64[num_ranks][num_chunks] | counts int32[2][num_ranks][columns] |
//   staging [num_ranks][num_max_tokens] slots
//
// Row `source` of every array is written by rank `source` only. Flags hold the sequence number of the call they belong to, so nothing
// is cleared between calls.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/types.h"

#if defined(__CUDACC__)
#define DEEPEP_MOE_HD __host__ __device__
#else
#define DEEPEP_MOE_HD
#endif

namespace deepep_moe {

constexpr int kMaxGpuRanks = 8;
constexpr int kChunkSlots = 32;       // rows released by one flag
constexpr int kTokensPerSegment = 64;  // tokens counted by one warp

struct GpuWorkspaceConfig {
    int num_ranks, num_experts, num_topk, hidden;
    int64_t num_max_tokens;
};

DEEPEP_MOE_HD constexpr int64_t divide_up(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

// One token on its way: its row, then `row of recv_x` (or local expert) and weight of each lane, then its scales.
struct GpuSlotLayout {
    int64_t lanes_offset, weights_offset, scales_offset, bytes;
    DEEPEP_MOE_HD GpuSlotLayout(int num_topk, int64_t row_bytes, int64_t scale_bytes)
        : lanes_offset(row_bytes),
          weights_offset(lanes_offset + 4 * num_topk),
          scales_offset(divide_up(weights_offset + 4 * num_topk, 16) * 16),
          bytes(divide_up(scales_offset + scale_bytes, 128) * 128) {}
};

struct GpuWorkspaceLayout {
    int64_t entered, refused, counts_ready, arrived, counts, staging, total_bytes;
    int64_t columns, num_chunks, staging_bytes;  // columns: experts, then ranks; staging_bytes: of one source

    DEEPEP_MOE_HD explicit GpuWorkspaceLayout(const GpuWorkspaceConfig& c)
        : entered(0),
          refused(entered + 8 * c.num_ranks),
          counts_ready(refused + 8 * c.num_ranks),
          arrived(counts_ready + 8 * c.num_ranks),
          columns(c.num_experts + c.num_ranks),
          num_chunks(divide_up(c.num_max_tokens, kChunkSlots)) {
        counts = arrived + 8 * c.num_ranks * num_chunks;
        staging = divide_up(counts + 2 * 4 * c.num_ranks * columns, 128) * 128;
        staging_bytes = c.num_max_tokens * GpuSlotLayout(c.num_topk, 4 * static_cast<int64_t>(c.hidden), 0).bytes;
        total_bytes = staging + c.num_ranks * staging_bytes;
    }
};

}  // namespace deepep_moe

// What the low-latency kernels are launched with, besides the params of common/low_latency.h.
#pragma once

#include "cuda/waits.h"
#include "common/low_latency.h"

namespace deepep_moe {

constexpr int kLowLatencyMaxBlocks = 1024;

// Rows of a turn on GPUs: slots [num_ranks][num_max_tokens], each
//   head: LowLatencyLane[num_topk] in lines of kLineLanes; it is all, where no lane has an expert here
//   row: pieces of 16 bytes in lines of kLinePieces, then scales f32[2], of the blocks of the first and the last piece
// and over nodes, behind all slots, landed u64[num_ranks][num_max_tokens]: flags of rows of other nodes that this rank may read.
// In a combine the row is another rank's sum of a token of this rank, and the head, if the call brings weights, those of a token whose rows
// this rank sums.
// A line is 128 bytes and ends with its flag, the value 0. Eight lanes of a warp store it, and load it, with one instruction each, which
// NVLink and memory take as one, so that a line with its flag has all of its bytes. No manual says so: NCCL's LL128 protocol relies on it,
// and benchmarks/probes/torn_lines.cu looks for exceptions. A row that brings its flags is not held up until a link has acknowledged it.
constexpr int kLineBytes = 128, kLineLanes = 15, kLinePieces = 7;

struct GpuLowLatencyLayout : LowLatencyLayout {
    int64_t head_bytes, slot_bytes, landed;

    GpuLowLatencyLayout() = default;
    DEEPEP_MOE_HD GpuLowLatencyLayout(const LowLatencyConfig& c, int num_nodes)
        : LowLatencyLayout(c, c.capacity() * bytes_of_slot(c) + (num_nodes > 1 ? round_up(8 * c.capacity(), 128) : 0)),
          head_bytes(bytes_of_head(c)),
          slot_bytes(bytes_of_slot(c)),
          landed(rows + c.capacity() * bytes_of_slot(c)) {}
    DEEPEP_MOE_HD static constexpr int64_t lines_of(int64_t num_pieces) { return (num_pieces + kLinePieces - 1) / kLinePieces; }

private:
    DEEPEP_MOE_HD static int64_t bytes_of_head(const LowLatencyConfig& c) {
        return kLineBytes * ((c.num_topk + kLineLanes - 1) / kLineLanes);
    }
    DEEPEP_MOE_HD static int64_t bytes_of_slot(const LowLatencyConfig& c) {
        return bytes_of_head(c) + kLineBytes * lines_of(round_up(c.hidden, 4) / 4);
    }
};

// In device memory, of one rank.
struct LowLatencyState {
    unsigned long long num_sent[kLowLatencyMaxBlocks];  // calls, as each block of the next one reads it and counts it for itself
    // 2 * call + 1 where its blocks have agreed that the rank came, + 0 that it did not.
    unsigned long long verdicts[kTurns][kLowLatencyMaxRanks];
    unsigned long long first_calls[kLowLatencyMaxRanks];  // of each rank since it was last taken back: it has no part in those before
    unsigned masks;                                       // bit r: rank r is masked
    int gave_up;
    GpuEnded ended;
};

struct LowLatencyContext : GpuWaits {
    LowLatencyConfig config;
    unsigned first_rank, ranks_per_node;  // of this node: ranks that reach each other
    unsigned rail;                        // bit r: rank r has index 0 in its node
    GpuLowLatencyLayout layout;
    LowLatencyState* state;
    unsigned* seen_masks;  // host memory: of the state
    bool masks_stalled;
    unsigned long long failed;                   // what marks handles of this buffer's failed dispatches: nobody clears their memory before
    std::byte* workspaces[kLowLatencyMaxRanks];  // of all ranks, mapped here
};

// What a rank tells a peer of its refusal, in place of the peer's `reasons`.
struct LowLatencyReason {
    GpuFailure why;  // where its GPU has refused topk_idx: kind, peer the lane, expected the token, seen the value
    char text[kMaxReasonBytes - sizeof(GpuFailure)];
};
static_assert(sizeof(LowLatencyReason) == kMaxReasonBytes);

template <class Params>
struct LowLatencyLaunch {
    LowLatencyContext context;
    Params call;
    bool sends, receives;
    int num_blocks;
    bool enters = true;  // a combine: this kernel tells the peers of the call
};

// What a rank does between calls.
struct LowLatencyControlParams {
    enum Action { kMask, kUnmask, kTellReturned, kRejoin, kRefuse, kCatchUp } action;  // over nodes the third comes behind the second
    LowLatencyContext context;
    int rank;                      // to mask or take back
    char reason[kMaxReasonBytes];  // of a refusal
};

}  // namespace deepep_moe

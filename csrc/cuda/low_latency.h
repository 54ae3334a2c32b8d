// Launch parameters of the low-latency kernels, besides those of common/low_latency.h.
#pragma once

#include "cuda/waits.h"
#include "common/low_latency.h"

namespace deepep_moe {

constexpr int kLowLatencyMaxBlocks = 1024;

// Rows of a turn on GPUs are slots [num_ranks][num_max_tokens]. Each slot has two parts.
//   Head: LowLatencyLane[num_topk] in lines of kLineLanes. A slot is only a head where no entry of the token has an expert here.
//   Row: pieces of 16 bytes in lines of kLinePieces, then scales f32[2] for the blocks of the first and the last piece.
// Over nodes, landed u64[num_ranks][num_max_tokens] follows all slots: flags of rows of other nodes that this rank may read.
// In a combine, the row is another rank's sum for a token of this rank. If the call brings weights, the head has those of a token whose
// rows this rank sums.
//
// A line is 128 bytes and ends with its flag, the value 0. Eight threads of a warp store or load it with one instruction each. NVLink and
// memory handle these as one access, so a line whose flag has arrived is complete. No manual promises this: NCCL's LL128 protocol relies
// on it, and benchmarks/probes/torn_lines.cu looks for exceptions. Such a row needs no separate flag, and so no wait for the link.
constexpr int kLineBytes = 128, kLineLanes = 15, kLinePieces = 7;

// Lays out a rank's workspace, which its peers write:
//
//   resumed u64[num_ranks] | left u64[num_ranks] | reasons char[kTurns][num_ranks][kMaxReasonBytes] | kTurns turns, each:
//     entered u64[num_ranks] | counts u64[num_ranks][num_local_experts] | rows as above.
//
// Only rank `source` writes row `source` of every array; for a source in another node, the rank of its rail here does. Flags hold the
// number of their call, what the rank does in it, and a value, so nothing is cleared between calls. The value of `entered` is the rank's
// number of tokens, or in a combine the last bits of its dispatch's number. The value of each of `counts` is the rank's number of tokens
// for an expert.
struct GpuLowLatencyLayout {
    int64_t resumed, left, reasons, turns, total_bytes;
    int64_t num_ranks;
    int64_t entered, counts, rows, turn_bytes;  // in a turn
    int64_t head_bytes, slot_bytes, landed;

    GpuLowLatencyLayout() = default;
    DEEPEP_MOE_HD GpuLowLatencyLayout(const LowLatencyConfig& c, int num_nodes) : resumed(0), num_ranks(c.num_ranks), entered(0) {
        const int64_t ranks = c.num_ranks;
        left = 8 * ranks;
        reasons = left + 8 * ranks;
        turns = round_up(reasons + kMaxReasonBytes * ranks * kTurns, 128);
        counts = 8 * ranks;
        rows = round_up(counts + 8 * ranks * c.num_local_experts, 128);
        head_bytes = kLineBytes * ((c.num_topk + kLineLanes - 1) / kLineLanes);
        slot_bytes = head_bytes + kLineBytes * lines_of(round_up(c.hidden, 4) / 4);
        landed = rows + c.capacity() * slot_bytes;
        turn_bytes = landed + (num_nodes > 1 ? round_up(8 * c.capacity(), 128) : 0);
        total_bytes = turns + kTurns * turn_bytes;
    }
    DEEPEP_MOE_HD static constexpr int64_t lines_of(int64_t num_pieces) { return (num_pieces + kLinePieces - 1) / kLinePieces; }
    // The next functions return offsets of words that a rank writes in the workspace of another.
    DEEPEP_MOE_HD int64_t resumed_of(int source) const { return resumed + 8 * source; }
    // Each turn has its own reason, because a rank may refuse two calls before a peer reads the first reason.
    DEEPEP_MOE_HD int64_t reason_of(int source, unsigned long long call) const {
        return reasons + kMaxReasonBytes * (static_cast<int64_t>(call % kTurns) * num_ranks + source);
    }
};

// The state of one rank, in device memory.
struct LowLatencyState {
    unsigned long long num_sent[kLowLatencyMaxBlocks];  // number of the last call; each block of the next one reads and counts its entry
    // 2 * call + 1 where the blocks of this rank have agreed that the other rank came, 2 * call where it did not.
    unsigned long long verdicts[kTurns][kLowLatencyMaxRanks];
    unsigned long long first_calls[kLowLatencyMaxRanks];  // first call of each rank since it was last taken back
    unsigned masks;                                       // bit r: rank r is masked
    int gave_up;
    GpuEnded ended;
};

struct LowLatencyContext : GpuWaits {
    LowLatencyConfig config;
    unsigned first_rank, ranks_per_node;  // ranks of this node, which map each other's memory
    unsigned rail;                        // bit r: rank r has index 0 in its node
    GpuLowLatencyLayout layout;
    LowLatencyState* state;
    unsigned* seen_masks;  // host memory: copy of state->masks
    bool masks_stalled;
    unsigned long long failed;  // value that marks handles of failed dispatches; differs by buffer, because handles are not cleared before
    std::byte* workspaces[kLowLatencyMaxRanks];  // workspaces of all ranks, mapped here
};

// A refusing rank writes this reason to a peer, into the peer's `reasons`.
struct LowLatencyReason {
    GpuFailure why;  // set if the GPU refused topk_idx: kind; peer is the top-k entry, expected the token, seen the value
    char text[kMaxReasonBytes - sizeof(GpuFailure)];
};
static_assert(sizeof(LowLatencyReason) == kMaxReasonBytes);

template <class Params>
struct LowLatencyLaunch {
    LowLatencyContext context;
    Params call;
    bool sends, receives;
    int num_blocks;
    bool enters = true;  // a combine: whether this kernel writes the entry into the call
};

// Actions of a rank between calls.
struct LowLatencyControlParams {
    // Over nodes kTellReturned follows kUnmask.
    enum Action { kMask, kUnmask, kTellReturned, kRejoin, kRefuse, kCatchUp } action;
    LowLatencyContext context;
    int rank;                      // to mask or take back
    char reason[kMaxReasonBytes];  // reason of a refusal
};

}  // namespace deepep_moe

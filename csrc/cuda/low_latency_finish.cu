// The receiving half of a low-latency combine over nodes adds the sums of all nodes, in node order.
//
//   One warp        Waits until the rail is in the call. Each other warp of a block waits for rows from other nodes.
//   Then all        Each thread adds one part of a token: the sums of this node's ranks, and one row of each other node.
#include <algorithm>

#include "cuda/device/launch.cuh"
#include "cuda/device/low_latency_sums.cuh"
#include "cuda/launch.h"

namespace deepep_moe {
namespace {

using Launch = LowLatencyRailCombine;

constexpr int kThreads = tuning::kLowLatencyThreads, kWarps = kThreads / 32;
constexpr int kAhead = 4;  // rows of other nodes in flight at once

// A task has one part of a token for each thread of the block, and the rows that are summed for them.
struct Task {
    int token, first_part;
    TokenSums node_sums;             // sums of this node's ranks
    int num, num_before;             // rows of other nodes, and those of the nodes before this one
    int nodes[kLowLatencyMaxRanks];  // nodes of these rows
    const uint4* rows[kLowLatencyMaxRanks];
};

template <bool kQuantized>
struct Shared {
    unsigned came;  // bit mask of the nodes that combine for the same dispatch
    Task tasks[kWarps - 1];
    alignas(16) uint4 ahead[kAhead][kThreads];                        // a piece of each row for each thread
    alignas(16) float scales[kAhead][kQuantized ? 4 * kThreads : 4];  // four for each thread, one of which belongs to its piece
};

template <DType kType, bool kQuantized>
struct Finisher {
    using Sums = NodeSums<kType, kQuantized>;

    const RailCall rail;
    const LowLatencyContext& c;
    const LowLatencyCombineParams& p;
    const unsigned long long flag;  // flag of this rank in the call, with value 0
    const Sums sums;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_nodes, num_tasks;  // num_tasks: of one token
    const int64_t row_bytes;                                                           // bytes of a row between nodes

    __device__ Finisher(const Launch& l, unsigned long long call)
        : rail(l.rail, call),
          c(l.rail.context),
          p(l.call),
          flag(p.what.flag(call, 0)),
          sums(c, flag),
          num_nodes(l.rail.num_nodes),
          num_tasks((sums.num_parts + kThreads - 1) / kThreads),
          row_bytes(rail_row_bytes(c.config, 16 * static_cast<int64_t>(sums.num_pieces), kQuantized)) {}

    __device__ static Shared<kQuantized>& shared() { return *shared_memory<Shared<kQuantized>>(); }

    // Returns the bit mask of the ranks, of all nodes, that have rows of a token.
    __device__ unsigned ranks_of(int token) const { return in_handle<unsigned>(p, LowLatencyHandleLayout(c.config).rank_masks)[token]; }

    __device__ void run() const {
        const int end = p.num_tokens * num_tasks, step = static_cast<int>(gridDim.x);
#pragma unroll 1
        for (int first = blockIdx.x; first < end || first == static_cast<int>(blockIdx.x); first += (kWarps - 1) * step) {
            if (warp != 0)
                find(first + (warp - 1) * step, end, shared().tasks[warp - 1]);
            else if (first == static_cast<int>(blockIdx.x))
                meet_rail();
            __syncthreads();
#pragma unroll 1
            for (int n = 0; n < kWarps - 1 && first + n * step < end; ++n) add_up(shared().tasks[n]);
            __syncthreads();
        }
    }

    // Store the bit mask of the nodes that have come. One warp calls it.
    __device__ void meet_rail() const {
        bool came = lane == rail.r.node;
        if (lane < num_nodes && !came && !rail.is_lost(lane)) {
            const int source = rail.rank_in(lane);
            const unsigned long long since = now_ns(), *const entered = rail.entered(source);
            const unsigned long long word = blockIdx.x == 0 ? rail.wait_to_tell(entered, source, GpuPhase::kRailEntry, behind_node_ns(c))
                                                            : rail.wait(entered, source, GpuPhase::kRailEntry, behind_node_ns(c));
            if (blockIdx.x == 0) count_wait(c, p.statistics, source, since);
            if (blockIdx.x == 0 && word != 0) rail.tell_entered(source, word);  // ranks that catch up on this call look for it
            came = word != 0 && check_along(c, p, flag, word, source);
            if (c.masks_stalled) came = agree(c, rail.call, source, came);
        }
        const unsigned nodes = __ballot_sync(kFullWarp, came);
        if (lane == 0) shared().came = nodes;
    }

    // Wait for the rows of a task's token, a thread for each node, and collect those that come. One warp calls it.
    __device__ void find(int task, int end, Task& out) const {
        if (task >= end) return;
        const int token = task / num_tasks, source = rail.rank_in(min(lane, num_nodes - 1));
        const unsigned ranks = ranks_of(token);
        bool is_here = false;
        if (lane < num_nodes && lane != rail.r.node && (ranks & rail.ranks_of(lane)) != 0)
            is_here = rail.wait(rail.arrived(source, token), source, GpuPhase::kRailRows, behind_node_ns(c)) != 0;
        const unsigned nodes = __ballot_sync(kFullWarp, is_here), before = nodes & ((1u << lane) - 1);
        if (is_here) out.nodes[__popc(before)] = lane, out.rows[__popc(before)] = pieces(rail.row(source, token, row_bytes));
        if (lane == rail.r.node) out.num_before = __popc(before);
        if (lane == 0) out.token = token, out.first_part = (task - token * num_tasks) * kThreads, out.num = __popc(nodes);
        find_sums(rail, rail.r.node, token, (ranks & rail.ranks_of(rail.r.node)) >> rail.first_rank(), out.node_sums);
    }

    // Add up one part of a token. Copies of other nodes' rows start before the wait for this node's sums.
    __device__ void add_up(const Task& task) const {
        const int part = task.first_part + warp * 32, piece = piece_of(part + lane);
        if (part >= sums.num_parts) return;
        const bool is_any = !ends_line() && piece < sums.num_pieces;
#pragma unroll 1
        for (int n = 0; n < min(task.num, kAhead) && is_any; ++n) {
            const int block = piece / kPiecesOfBlock;
            copy_async(&shared().ahead[n][threadIdx.x], task.rows[n] + piece);
            if constexpr (kQuantized) copy_async(&shared().scales[n][4 * threadIdx.x], scales_of(task.rows[n]) + block / 4 * 4);
        }
        float node_sum[Sums::kColumns] = {}, total[Sums::kColumns] = {};
        sums.add_ranks(node_sum, task.node_sums, part + lane);
        if (!is_any) return;
        wait_copies();
        add_rows(total, task, 0, task.num_before, piece);
#pragma unroll
        for (int v = 0; v < Sums::kColumns; ++v) total[v] = __fadd_rn(total[v], node_sum[v]);
        add_rows(total, task, task.num_before, task.num, piece);
        constexpr int kPieces = Sums::kColumns / Sums::Values::kCount;
        uint4* const to = pieces(p.combined_x) + (task.token * static_cast<int64_t>(sums.num_pieces) + piece) * kPieces;
#pragma unroll
        for (int j = 0; j < kPieces; ++j) to[j] = Sums::Values::store(total + j * Sums::Values::kCount);
    }

    __device__ void add_rows(float (&total)[Sums::kColumns], const Task& task, int begin, int end, int piece) const {
#pragma unroll 1
        for (int n = begin; n < end; ++n)
            if ((shared().came >> task.nodes[n] & 1) != 0) {
                const uint4 row = n < kAhead ? shared().ahead[n][threadIdx.x] : __ldcg(task.rows[n] + piece);
                if constexpr (kQuantized) {
                    const int block = piece / kPiecesOfBlock;
                    add_fp8(total, row,
                            n < kAhead ? shared().scales[n][4 * threadIdx.x + block % 4] : __ldcg(scales_of(task.rows[n]) + block));
                } else {
                    add_piece<kType>(total, row);
                }
            }
    }

    __device__ const float* scales_of(const uint4* row) const { return reinterpret_cast<const float*>(row + sums.num_pieces); }
};

template <DType kType, bool kQuantized>
__global__ void __launch_bounds__(kThreads, 2) low_latency_finish(const __grid_constant__ Launch l) {
    let_next_kernel_start();
    wait_for_kernel_before();
    Finisher<kType, kQuantized>(l, *reinterpret_cast<const unsigned long long*>(l.call.call)).run();
}

}  // namespace

void launch_low_latency_finish(Launch l, void* stream) {
    l.call.what.operation = LowLatencyOperation::kCombine;
    const int64_t threads = kPartsOfLine * GpuLowLatencyLayout::lines_of(l.rail.context.config.hidden / 4);  // for a token, at most
    l.num_blocks = static_cast<int>(std::clamp<int64_t>(l.call.num_tokens * ((threads + kThreads - 1) / kThreads), 1, l.num_blocks));
    with_types(l.call.what, [&](auto dtype, auto fp8) {
        launch<low_latency_finish<dtype.value, fp8.value>>("low_latency_finish", l.num_blocks, kThreads, sizeof(Shared<fp8.value>), l,
                                                           stream, starts_early());
    });
}

}  // namespace deepep_moe

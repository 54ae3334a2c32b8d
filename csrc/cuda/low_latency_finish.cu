// The half of a low-latency combine over nodes that receives: adds the sums of all nodes, in their order.
//
//   one warp       waits until the rail is in the call; the others of a block each for rows that the block needs of other nodes
//   then all       a part of a token a thread: what the ranks of this node have, and a row of each other node
#include <algorithm>

#include "cuda/device/launch.cuh"
#include "cuda/device/low_latency_sums.cuh"
#include "cuda/launch.h"

namespace deepep_moe {
namespace {

using Launch = LowLatencyRailCombine;

constexpr int kThreads = tuning::kLowLatencyThreads, kWarps = kThreads / 32;

// In shared memory.
struct Shared {
    unsigned came;                                  // nodes that combine along the same dispatch
    unsigned nodes[kWarps - 1], ranks[kWarps - 1];  // whose rows of a token have come; of this node, that have the token
};

template <DType kType>
struct Finisher {
    using Sums = NodeSums<kType>;

    const RailCall rail;
    const LowLatencyContext& c;
    const LowLatencyCombineParams& p;
    const unsigned long long flag;  // of this rank in the call, its value 0
    const Sums sums;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_nodes, num_tasks;  // tasks: of a token
    const int64_t row_bytes;

    __device__ Finisher(const Launch& l, unsigned long long call)
        : rail(l.rail, call),
          c(l.rail.context),
          p(l.call),
          flag(p.what.flag(call, 0)),
          sums(rail, flag),
          num_nodes(l.rail.num_nodes),
          num_tasks((sums.num_parts + kThreads - 1) / kThreads),
          row_bytes(16 * static_cast<int64_t>(sums.num_pieces)) {}

    __device__ static Shared& shared() { return *shared_memory<Shared>(); }

    // The ranks of all nodes that have rows of a token.
    __device__ unsigned ranks_of(int token) const {
        return reinterpret_cast<const unsigned*>(p.handle + LowLatencyHandleLayout(c.config).rank_masks)[token];
    }

    __device__ void run() const {
        const int end = p.num_tokens * num_tasks, step = static_cast<int>(gridDim.x);
#pragma unroll 1
        for (int first = blockIdx.x; first < end || first == static_cast<int>(blockIdx.x); first += (kWarps - 1) * step) {
            if (warp != 0)
                wait_rows(first + (warp - 1) * step, end);
            else if (first == static_cast<int>(blockIdx.x))
                meet_rail();
            __syncthreads();
#pragma unroll 1
            for (int n = 0; n < kWarps - 1 && first + n * step < end; ++n)
                add_up(first + n * step, shared().nodes[n] & shared().came, shared().ranks[n]);
            __syncthreads();
        }
    }

    // One warp: which nodes have come, in bits.
    __device__ void meet_rail() const {
        bool came = lane == rail.r.node;
        if (lane < num_nodes && !came && !rail.is_lost(lane)) {
            const int source = rail.rank_in(lane);
            const unsigned long long since = now_ns(), *const entered = rail.entered(source);
            const unsigned long long word = blockIdx.x == 0 ? rail.wait_to_tell(entered, source, GpuPhase::kRailEntry, behind_node_ns(c))
                                                            : rail.wait(entered, source, GpuPhase::kRailEntry, behind_node_ns(c));
            if (blockIdx.x == 0) count_wait(c, p.statistics, source, since);
            if (blockIdx.x == 0 && word != 0) rail.tell_entered(source, word);  // who catches up on this call looks for it
            came = word != 0 && check_entry(source, word);
            if (c.masks_stalled) came = agree(c, rail.call, source, came);
        }
        const unsigned nodes = __ballot_sync(kFullWarp, came);
        if (lane == 0) shared().came = nodes;
    }

    __device__ bool check_entry(int source, unsigned long long word) const {
        if (LowLatencyWhat::unpacked(LowLatencyWhat::packed_in(word)).is_refused) rail.keep_reason(source);
        return check_along(c, p, flag, word, source);
    }

    // One warp, lane by node: until the rows of a task's token have come, as far as they will.
    __device__ void wait_rows(int task, int end) const {
        const unsigned ranks = task < end ? ranks_of(task / num_tasks) : 0;
        bool is_here = false;
        if (lane < num_nodes && lane != rail.r.node && (ranks & rail.ranks_of(lane)) != 0) {
            const int source = rail.rank_in(lane);
            is_here = rail.wait(rail.arrived(source, task / num_tasks), source, GpuPhase::kRailRows, behind_node_ns(c)) != 0;
        }
        const unsigned nodes = __ballot_sync(kFullWarp, is_here);
        if (lane != 0) return;
        shared().nodes[warp - 1] = nodes;
        shared().ranks[warp - 1] = (ranks & rail.ranks_of(rail.r.node)) >> rail.first_rank();
    }

    // nodes: other ones, of which there is a row; ranks: of this one. Rows of the first ones set out before anything is waited for.
    __device__ void add_up(int task, unsigned nodes, unsigned ranks) const {
        constexpr int kAhead = 2;
        const int token = task / num_tasks, part = task % num_tasks * kThreads + warp * 32, piece = piece_of(part + lane);
        if (part >= sums.num_parts) return;
        const bool is_any = !ends_line() && piece < sums.num_pieces;
        const auto load = [&](int node) { return __ldcg(pieces(rail.row(rail.rank_in(node), token, row_bytes)) + piece); };
        uint4 ahead[kAhead] = {};
        unsigned rest = is_any ? nodes : 0;
#pragma unroll
        for (int n = 0; n < kAhead; ++n, rest &= rest - 1)
            if (rest != 0) ahead[n] = load(__ffs(rest) - 1);
        float total[Sums::kColumns] = {};
        int num_before = 0;
#pragma unroll 1
        for (int node = 0; node < num_nodes; ++node) {
            if (node == rail.r.node) {
                float sum[Sums::kColumns] = {};
                sums.add_ranks(sum, node, token, ranks, part + lane);
#pragma unroll
                for (int v = 0; v < Sums::kColumns; ++v) total[v] = __fadd_rn(total[v], sum[v]);
            } else if ((nodes >> node & 1) != 0 && is_any) {
                Sums::add(total, num_before == 0 ? ahead[0] : num_before == 1 ? ahead[1] : load(node));
                ++num_before;
            }
        }
        if (is_any) pieces(p.combined_x + token * row_bytes)[piece] = Sums::Values::store(total);
    }
};

template <DType kType>
__global__ void __launch_bounds__(kThreads, 2) low_latency_finish(const __grid_constant__ Launch l) {
    let_next_kernel_start();
    wait_for_kernel_before();
    Finisher<kType>(l, *reinterpret_cast<const unsigned long long*>(l.call.call)).run();
}

}  // namespace

void launch_low_latency_finish(Launch l, void* stream) {
    l.call.what.operation = LowLatencyOperation::kCombine;
    const int64_t threads = kPartsOfLine * GpuLowLatencyLayout::lines_of(l.rail.context.config.hidden / 4);  // for a token, at most
    l.num_blocks = static_cast<int>(std::clamp<int64_t>(l.call.num_tokens * ((threads + kThreads - 1) / kThreads), 1, l.num_blocks));
    with_dtype(l.call.what.dtype, "combine takes float32, bfloat16 or float16", [&](auto dtype) {
        launch<low_latency_finish<dtype.value>>("low_latency_finish", l.num_blocks, kThreads, sizeof(Shared), l, stream, starts_early());
    });
}

}  // namespace deepep_moe

// Sends between nodes in a low-latency combine, around the node's sending kernel (cuda/low_latency_combine.cu).
//
//   weigh  Brings the weights, if the call has any. It runs before that kernel, which then finds weights of other nodes as if their
//          ranks were in this one.
//   sum    Runs after that kernel, which has pushed this rank's sums to the rank of this node that has the index of the token's rank. It
//          meets the ranks of its node, enters the call in the other nodes, and adds up the sums of its node for tokens of those. It puts
//          one row at a time.
//
// The half that receives is cuda/low_latency_finish.cu.
#include <nvshmem.h>
#include <nvshmemx.h>

#include "cuda/device/low_latency_sums.cuh"
#include "nvshmem/low_latency_rail.cuh"
#include "nvshmem/rail.h"

namespace deepep_moe {
namespace {

using Launch = LowLatencyRailCombine;

constexpr int kThreads = tuning::kLowLatencyThreads, kWarps = kThreads / 32, kLastWarp = kWarps - 1;
constexpr int kPiecesAtOnce = kThreads / kPartsOfLine * kLinePieces;  // pieces that a block handles at once
static_assert(kPiecesAtOnce % kWholePieces == 0);

// Both kernels share the words of a call, and the entry in this node.
struct RailCombine {
    const RailPuts rail;
    const LowLatencyContext& c;
    const LowLatencyConfig& config;
    const LowLatencyCombineParams& p;
    const unsigned long long flag;  // this rank's flag in the call, with value 0
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

    __device__ RailCombine(const LowLatencyRailCombine& l, unsigned long long call)
        : rail(l.rail, call), c(l.rail.context), config(c.config), p(l.call), flag(p.what.flag(call, 0)) {}

    // Returns the number of tokens of the rail's rank in `node`.
    __device__ int tokens_of(int node) const {
        return in_handle<int32_t>(p, LowLatencyHandleLayout(config).num_tokens)[rail.rank_in(node)];
    }
    // Returns the ranks of this node that have rows of a token of that rank, as bits of their index.
    __device__ unsigned ranks_of(int node, int token) const {
        return in_handle<unsigned>(p, LowLatencyRailHandle(config, rail.r.num_nodes).in_ranks)[node * config.num_max_tokens + token];
    }

    __device__ unsigned long long own_word() const { return flag + LowLatencyWhat::value_in(dispatch_of(p)); }
    __device__ unsigned long long refusing_word() const {
        LowLatencyWhat what = p.what;
        what.is_refused = true;
        return what.flag(rail.call, 0);
    }
    __device__ GpuFailure failed_handle() const {
        return {kFailedHandle, c.rank, static_cast<int>(GpuPhase::kEntry), static_cast<long long>(dispatch_of(p)), 0};
    }

    // Enter the call in this node: thread r writes the entry at rank r. It may be done twice. One warp calls it.
    __device__ void enter_node(bool failed) const {
        const int to = rail.first_rank() + lane;
        if (lane == 0) *reinterpret_cast<unsigned long long*>(p.call) = rail.call;
        if (failed && lane == 0) report(c, kFailedHandle, c.rank, GpuPhase::kEntry, static_cast<long long>(dispatch_of(p)), 0);
        if (lane >= rail.r.ranks_per_node || is_masked(c, to)) return;
        if (failed) tell_reason(c, to, rail.call, failed_handle());
        store_relaxed(Turn(c, to, rail.call).entered(c.rank), failed ? refusing_word() : own_word());
    }
};

// ---- weigh ----

// One block for each other node puts this rank's weights there, and waits for those of the rail's rank there. It pushes these, in heads
// like a dispatch's, to the ranks of this node that have rows of the token.
struct Weigher : RailCombine {
    using RailCombine::RailCombine;

    // Holds the word of the rail's rank in the block's node.
    __device__ static unsigned long long& shared_word() { return *shared_memory<unsigned long long>(); }

    __device__ void run() const {
        const bool failed = has_failed(c, p);
        const int node = rail.node_at(1 + static_cast<int>(blockIdx.x));
        if (blockIdx.x == 0 && warp == 0) enter_node(failed);
        failed ? refuse(node) : send(node);
        if (threadIdx.x == 0) shared_word() = hear(rail.rank_in(node));
        __syncthreads();
        if (!failed && ((shared_word() ^ flag) >> kValueBitsOfFlag) == 0) push(node);
    }

    __device__ void send(int node) const {
        auto* const to = reinterpret_cast<float*>(rail.message_for(node) + rail.r.layout.weights);
        const int num_lanes = p.num_tokens * config.num_topk;
#pragma unroll 1
        for (int at = threadIdx.x; at < num_lanes; at += kThreads) to[at] = p.topk_weights[at];
        rail.put_weights(node, int64_t{4} * num_lanes, own_word());
    }

    // Refuse instead of sending weights, so that the other rank does not wait for them.
    __device__ void refuse(int node) const {
        if (threadIdx.x == 0) rail.write_reason(node, failed_handle());
        rail.put_message(node, sizeof(LowLatencyReason), refusing_word());
    }

    // Wait for the rail's rank, and tell this node's ranks, which wait for it too, its word or that it did not come. One thread calls it.
    __device__ unsigned long long hear(int source) const {
        const unsigned long long word = rail.wait_weights_to_tell(source, flag);
        rail.tell_entered(source, word != 0 ? word : rail.call << kWhatBits | LowLatencyWhat::kAbsent << kValueBitsOfFlag);
        return word;
    }

    // Each warp pushes the weights of one token of the rail's rank in a node.
    __device__ void push(int node) const {
        const int num_tokens = tokens_of(node), num_parts = static_cast<int>(c.layout.head_bytes / 16), source = rail.rank_in(node);
#pragma unroll 1
        for (int token = warp; token < num_tokens; token += kWarps) {
            const unsigned masks = __shfl_sync(kFullWarp, masks_of(c), 0);  // the same value in all threads
            LowLatencyLane entry{-1, 0, 0.0f};
            if (lane < config.num_topk) entry.weight = __ldcg(rail.weights(source, token) + lane);
            const uint4 part = head_part(entry, flag);
#pragma unroll 1
            for (unsigned rest = ranks_of(node, token) & ~(masks >> rail.first_rank()); rest != 0; rest &= rest - 1)
                store_part(Turn(c, rail.first_rank() + __ffs(rest) - 1, rail.call).head(source, token) + lane, part, lane < num_parts);
        }
    }
};

__global__ void __launch_bounds__(kThreads, 1) rail_weigh(const __grid_constant__ Launch l) {
    let_next_kernel_start();
    wait_for_kernel_before();
    Weigher(l, next_call(l.rail.context)).run();
}

// ---- sum ----

// Names a token of another node. It has_crossed if ranks of this node have rows of it.
struct Task {
    int node, token;  // the node is -1 past the last token
    bool has_crossed;
    TokenSums sums;
};

struct Shared {
    unsigned came;  // bit mask of the ranks of this node that combine for the same dispatch
    bool gave_up;
    Task tasks[2];                                // used in turns: one is added up while the next is found
    alignas(16) float largest[2][kPiecesAtOnce];  // largest magnitude of each piece, also used in turns
};

template <DType kType, bool kQuantized>
struct Summer : RailCombine {
    using Sums = NodeSums<kType, kQuantized>;

    const Sums sums;
    const int64_t row_bytes;

    __device__ Summer(const Launch& l, unsigned long long call)
        : RailCombine(l, call), sums(c, flag), row_bytes(rail_row_bytes(config, 16 * static_cast<int64_t>(sums.num_pieces), kQuantized)) {}

    __device__ static Shared& shared() { return *shared_memory<Shared>(); }

    __device__ void run() const {
        const bool failed = has_failed(c, p);
        if (blockIdx.x == 0 && warp == 0) enter_node(failed);
        __syncthreads();
        if (warp == 0) {
            const unsigned came = failed ? 0 : meet_node();
            if (lane == 0) shared().came = came;
        }
        __syncthreads();
        const int num_peers = rail.r.num_nodes - 1, step = static_cast<int>(gridDim.x);
        int nth = blockIdx.x;  // entries come first, then the tokens of one node after the other
#pragma unroll 1
        for (; nth < num_peers; nth += step) enter_rail(rail.node_at(nth + 1), failed);
        nth -= num_peers;
        if (warp == kLastWarp) find(nth, failed, shared().tasks[0]);
        __syncthreads();
#pragma unroll 1
        for (int turn = 0; shared().tasks[turn].node >= 0; turn ^= 1) {
            if (warp == kLastWarp) find(nth += step, failed, shared().tasks[turn ^ 1]);
            send_sum(shared().tasks[turn]);
        }
    }

    // Find the nth token of other nodes, and its sums. One warp calls it.
    __device__ void find(int nth, bool failed, Task& out) const {
        int node = -1;
#pragma unroll 1
        for (int turn = 1; turn < rail.r.num_nodes && node < 0; ++turn) {
            const int next = rail.node_at(turn), num_tokens = failed ? 0 : tokens_of(next);
            if (nth < num_tokens)
                node = next;
            else
                nth -= num_tokens;
        }
        const unsigned ranks = node < 0 || rail.is_lost(node) ? 0 : ranks_of(node, nth);
        find_sums(rail, node, nth, ranks & shared().came, out.sums);
        if (lane == 0) out.node = node, out.token = nth, out.has_crossed = ranks != 0;
    }

    // Returns which ranks of this node have come, as bits of their index. One warp calls it.
    __device__ unsigned meet_node() const {
        const int source = rail.first_rank() + lane;
        bool came = false;
        if (lane < rail.r.ranks_per_node) {
            const unsigned long long since = now_ns(), *const entered = Turn(c, c.rank, rail.call).entered(source);
            unsigned long long word =
                is_masked(c, source) ? 0 : wait_word_of(c, entered, rail.call, source, GpuPhase::kEntry, c.timeout_ns);
            if (blockIdx.x == 0) count_wait(c, p.statistics, source, since);
            came = word != 0 && check_along(c, p, flag, word, source);
            if (c.masks_stalled) came = agree(c, rail.call, source, came);
        }
        return __ballot_sync(kFullWarp, came);
    }

    // Enter the call in another node, as a refusal if this rank has failed or has heard of a failure. All threads call it.
    __device__ void enter_rail(int node, bool failed) const {
        if (threadIdx.x == 0) shared().gave_up = gave_up(c);
        __syncthreads();
        const bool refuses = failed || shared().gave_up;
        if (refuses && threadIdx.x == 0) rail.write_reason(node, failed ? failed_handle() : own_failure(c));
        rail.put_message(node, refuses ? static_cast<int64_t>(sizeof(LowLatencyReason)) : 0, refuses ? refusing_word() : own_word());
    }

    // Send the sum of this node's ranks for a token of the rail's rank in another node. All threads call it, and have met when it returns;
    // one warp puts while the others go on.
    __device__ void send_sum(const Task& task) const {
        const bool has_crossed = task.has_crossed;
        const int node = task.node, token = task.token;
        std::byte* const to = rail.row_for(node, token, row_bytes);
        if constexpr (kQuantized) {
            if (has_crossed) write_fp8(to, task.sums);
        } else {
#pragma unroll 1
            for (int part = warp * 32; has_crossed && part < sums.num_parts; part += kThreads) {
                float sum[Sums::kColumns] = {};
                sums.add_ranks(sum, task.sums, part + lane);
                const int piece = piece_of(part + lane);
                if (!ends_line() && piece < sums.num_pieces) pieces(to)[piece] = Sums::Values::store(sum);
            }
        }
        __syncthreads();
        // After a timeout on this rank the sum may be incomplete. Do not send it; the rank of the other node then times out as well.
        if (has_crossed && warp == 0 && __shfl_sync(kFullWarp, gave_up(c), 0) == 0) rail.put_row(node, token, to, row_bytes, flag);
    }

    // Write a row and its scales. Eight threads, not always of one warp, share a scale. All threads call it.
    __device__ void write_fp8(std::byte* to, const TokenSums& from) const {
#pragma unroll 1
        for (int first = 0; first < sums.num_parts; first += kThreads) {
            const int part = first + warp * 32, piece = piece_of(part + lane), nth = piece % kPiecesAtOnce;
            float* const largest = shared().largest[first / kThreads % 2];
            const bool is_any = !ends_line() && piece < sums.num_pieces;
            float sum[Sums::kColumns] = {};
            if (part < sums.num_parts) sums.add_ranks(sum, from, part + lane);
            if (is_any) largest[nth] = largest_of<1>(sum);
            __syncthreads();
            if (is_any) write_fp8_piece(to, piece, sum, largest + nth / kPiecesOfBlock * kPiecesOfBlock);
        }
    }
    // Write a piece as fp8, and its scale, from the largest magnitudes of the pieces that share the scale.
    __device__ void write_fp8_piece(std::byte* to, int piece, const float (&sum)[Sums::kColumns], const float* largest) const {
        float values[kPiecesOfBlock];
#pragma unroll
        for (int i = 0; i < kPiecesOfBlock; ++i) values[i] = largest[i];
        const Fp8Block block(largest_of<1>(values), false);
        pieces(to)[piece] = block.store(sum).raw;
        if (piece % kPiecesOfBlock == 0) reinterpret_cast<float*>(to + config.hidden)[piece / kPiecesOfBlock] = block.scale;
    }
};

// The node's sending kernel has counted the call already.
template <DType kType, bool kQuantized>
__global__ void __launch_bounds__(kThreads, 2) rail_sum(const __grid_constant__ Launch l) {
    let_next_kernel_start();
    wait_for_kernel_before();
    Summer<kType, kQuantized>(l, next_call(l.rail.context) - 1).run();
}

}  // namespace

const char* launch_rail_weigh(const Launch& l, void* stream) noexcept {
    return why_failed(
        [&] { launch<rail_weigh>("rail_weigh", l.num_blocks, kThreads, sizeof(unsigned long long), l, stream, starts_early()); });
}

const char* launch_rail_sum(const Launch& l, void* stream) noexcept {
    return why_failed([&] {
        with_types(l.call.what, [&](auto dtype, auto fp8) {
            constexpr DType kType = fp8.value ? DType::kBFloat16 : dtype.value;  // with fp8 one kernel serves every dtype
            launch<rail_sum<kType, fp8.value>>("rail_sum", l.num_blocks, kThreads, sizeof(Shared), l, stream, starts_early());
        });
    });
}

}  // namespace deepep_moe

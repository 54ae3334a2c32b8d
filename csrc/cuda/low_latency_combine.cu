// A low-latency combine is one kernel for the whole call, or two for its halves. It has no plan and needs no host.
//
//   Sending      Each block takes one token, sums the rows of its experts on this rank, and pushes the sum in lines that bring their
//                flags. The last warp sums nothing: it looks up the rows of the next token, and waits for its weights if the call has any.
//   Receiving    A warp waits until all ranks are in the call. Then each thread waits for its part of a token's sums, and adds them in
//                rank order.
//
// With weights, a block first pushes those of its tokens, in heads like a dispatch's, and waits until all ranks are in the call. Weights
// from other nodes have been pushed to this rank before (nvshmem/low_latency_combine.cu). Rows wait for their sum in shared memory, because
// registers could not hold all that must be in flight at once.
#include <algorithm>

#include "cuda/device/fp8.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/device/low_latency_lines.cuh"
#include "cuda/launch.h"

namespace deepep_moe {
namespace {

using Launch = LowLatencyLaunch<LowLatencyCombineParams>;

constexpr int kThreads = tuning::kLowLatencyThreads, kWarps = kThreads / 32, kLastWarp = kWarps - 1;
constexpr int kSummingThreads = kThreads / kPartsOfLine * kLinePieces;  // 8 parts of a line are 7 pieces
constexpr int kBatch = tuning::kLowLatencyBatch;
constexpr int kBatchPieces = kBatch * kSummingThreads;  // pieces that a block sums at a time: a bf16 row of 7168 columns
using tuning::kRanksAtOnce, tuning::kRowsOnTheirWay;

// Holds the rows of a token that are summed, and their weights.
struct TokenRows {
    int num, rows[kMaxTopk];
    float weights[kMaxTopk];
};

// The data in shared memory.
struct Shared {
    StagedPieces<kBatchPieces> staged;
    TokenRows tokens[2];  // used in turns: one is summed while the other is filled
    unsigned came;        // bit mask of the ranks that combine for the same dispatch
    alignas(16) uint4 rows[kRowsOnTheirWay * kBatchPieces];
};

static_assert(2 * (sizeof(Shared) + kStaticSharedBytes) <= 233472, "two blocks fit into an SM of an H100");

// Tell a rank why it gets nothing from this one in the call. One thread calls it.
__device__ __forceinline__ void refuse(const LowLatencyContext& c, LowLatencyWhat what, unsigned long long call, int to,
                                       const GpuFailure& why) {
    if (is_masked(c, to)) return;
    tell_reason(c, to, call, why);
    what.is_refused = true;
    store_relaxed(Turn(c, to, call).entered(c.rank), what.flag(call, 0));
}

// Refuse the call, because the dispatch of its handle has failed. All threads of a block call it.
__device__ __noinline__ void refuse_handle(const LowLatencyContext& c, LowLatencyWhat what, unsigned long long call,
                                           unsigned long long dispatch) {
    const int to = static_cast<int>(threadIdx.x);
    const GpuFailure why{kFailedHandle, c.rank, static_cast<int>(GpuPhase::kEntry), static_cast<long long>(dispatch), 0};
    if (to == 0) report(c, kFailedHandle, why.peer, GpuPhase::kEntry, why.expected, why.seen);
    __syncthreads();
    if (to < c.config.num_ranks) refuse(c, what, call, to, why);
}

// Refuse the ranks that this one has given up: without their weights it sums nothing for them, even if they come late. One warp calls it.
__device__ __noinline__ void refuse_late(const LowLatencyContext& c, LowLatencyWhat what, unsigned long long call, unsigned came) {
    const int to = static_cast<int>(threadIdx.x % 32);
    if (!gave_up(c) || to >= c.config.num_ranks || to == c.rank || !is_in_node(c, to) || (came >> to & 1) != 0) return;
    if (load_relaxed(Turn(c, c.rank, call).entered(to)) >> kWhatBits >= call) return;  // the rank is here, and does something else
    refuse(c, what, call, to, own_failure(c));
}

// With kWeighted the call brings weights.
template <DType kType, bool kQuantized, bool kWeighted>
struct Kernel {
    using Values = Piece<kType>;
    using Columns = Fp8Columns<Values::kCount>;
    using Sum = float[kBatch][Values::kCount];
    static constexpr int kColumns = kQuantized ? 16 : Values::kCount;             // columns of a piece as it travels
    static constexpr int kSentPieces = kBatchPieces * Values::kCount / kColumns;  // pieces of a batch as it travels
    using Staged = StagedPieces<kSentPieces>;                                     // not larger than Shared::staged

    const LowLatencyContext& c;
    const LowLatencyConfig& config;
    const LowLatencyCombineParams& p;
    const unsigned long long call, flag;  // flag: this rank's in the call, with value 0
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int num_pieces, num_sent;  // pieces of a row of x, and of a row as it travels
    const int64_t row_bytes;
    const LowLatencyHandleLayout handle;

    __device__ Kernel(const Launch& l, unsigned long long call)
        : c(l.context),
          config(c.config),
          p(l.call),
          call(call),
          flag(p.what.flag(call, 0)),
          num_pieces(config.hidden / Values::kCount),
          num_sent(kQuantized ? config.hidden / 16 : num_pieces),
          row_bytes(16 * static_cast<int64_t>(num_pieces)),
          handle(config) {}

    __device__ static Shared& shared() { return *shared_memory<Shared>(); }

    // Start copies to shared memory of pieces `at` and `at` + 32 of a token's rows, from the first-th row on.
    __device__ void load_rows(const TokenRows& token, int first, int at) const {
        const int count = min(kRowsOnTheirWay, token.num - first);
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            const uint4* const from = pieces(p.x + token.rows[first + i] * row_bytes) + at;
#pragma unroll
            for (int j = 0; j < kBatch; ++j)
                if (at + 32 * j < num_pieces) copy_async(place(i) + j * kSummingThreads, from + 32 * j);
        }
    }
    // Returns where this thread's piece of the nth row lies in shared memory. No other thread reads it.
    __device__ static uint4* place(int nth_row) { return shared().rows + nth_row * kBatchPieces + threadIdx.x; }

    // Add the rows to `sum`, in order. is_loaded: the copies of the first rows have been started.
    __device__ void sum_rows(Sum& sum, const TokenRows& token, int at, bool is_loaded) const {
#pragma unroll 1
        for (int first = 0; first < token.num; first += kRowsOnTheirWay) {
            if (first != 0 || !is_loaded) load_rows(token, first, at);
            wait_copies();
#pragma unroll 1
            for (int i = 0; i < min(kRowsOnTheirWay, token.num - first); ++i) {
                const float weight = token.weights[first + i];
#pragma unroll
                for (int j = 0; j < kBatch; ++j) {
                    float x[Values::kCount];
                    Values::load(place(i)[j * kSummingThreads], x);
#pragma unroll
                    for (int v = 0; v < Values::kCount; ++v) sum[j][v] = __fadd_rn(sum[j][v], __fmul_rn(weight, x[v]));
                }
            }
        }
    }

    // ---- sending ----

    __device__ void enter() const {
        if (threadIdx.x == 0) *reinterpret_cast<unsigned long long*>(p.call) = call;
        if (has_failed(c, p)) return refuse_handle(c, p.what, call, dispatch_of(p));
        if (threadIdx.x < config.num_ranks && !is_masked(c, threadIdx.x))
            store_relaxed(Turn(c, threadIdx.x, call).entered(c.rank), flag + LowLatencyWhat::value_in(dispatch_of(p)));
    }

    // A block sums its tokens one after the other. Meanwhile its last warp looks up the rows of the next token. Their copies start before
    // this token's sum is pushed, because pushing over the link is slow.
    __device__ void send() const {
        int num_tokens = lane < config.num_ranks ? in_handle<int32_t>(p, handle.num_tokens)[lane] : 0;
        if (has_failed(c, p)) num_tokens = 0;
        if constexpr (kWeighted) {
            if (!has_failed(c, p) && !meet_weights()) num_tokens = 0;
        }
        const int64_t most = __reduce_max_sync(kFullWarp, static_cast<unsigned>(num_tokens)),
                      end = min(config.num_ranks * most, config.capacity());
        int turn = 0;
        bool is_loaded = false;
        if (warp == kLastWarp) find_rows(blockIdx.x, num_tokens, shared().tokens[0]);
        __syncthreads();
#pragma unroll 1
        for (int nth = blockIdx.x; nth < end; nth += gridDim.x, turn ^= 1) {
            if (warp == kLastWarp) find_rows(nth + gridDim.x, num_tokens, shared().tokens[turn ^ 1]);
            const TokenRows &token = shared().tokens[turn], &next = shared().tokens[turn ^ 1];
            const bool sends = token.num != 0;
            if (sends) send_sum(token_at(nth), token, is_loaded, next);
            is_loaded = sends;
            __syncthreads();
        }
    }

    // Returns whether rank `lane` has come. If not, its weights are missing, and nothing is summed for it. All threads call it.
    __device__ bool meet_weights() const {
        send_weights();
        if (warp == 0) meet_along();
        __syncthreads();
        const unsigned came = shared().came;
        if (blockIdx.x == 0 && warp == 0) refuse_late(c, p.what, call, came);
        return (came >> lane & 1) != 0;
    }

    // Each warp sends the weights of one token to all ranks of this node that have rows of it.
    __device__ void send_weights() const {
        const int num_parts = static_cast<int>(c.layout.head_bytes / 16);
        const unsigned node = ranks_of_node(c);
#pragma unroll 1
        for (int token = blockIdx.x + warp * gridDim.x; token < p.num_tokens; token += kWarps * gridDim.x) {
            const unsigned masks = __shfl_sync(kFullWarp, masks_of(c), 0);  // the same value in all threads
            LowLatencyLane entry{-1, 0, 0.0f};
            if (lane < config.num_topk) entry.weight = p.topk_weights[static_cast<int64_t>(token) * config.num_topk + lane];
            const uint4 part = head_part(entry, flag);
#pragma unroll 1
            for (unsigned rest = ranks_of(token) & node & ~masks; rest != 0; rest &= rest - 1)
                store_part(Turn(c, __ffs(rest) - 1, call).head(c.rank, token) + lane, part, lane < num_parts);
        }
    }

    // Wait for the weight of each top-k entry of a token. Returns false if they do not come. One warp calls it.
    __device__ bool wait_weights(const SourceToken& from, float& weight) const {
        const uint4* const head = Turn(c, c.rank, call).head(from.source, from.token) + lane;
        const auto place = [&](int) { return lane < c.layout.head_bytes / 16 ? head : nullptr; };
        Parts<1> part;
        bool is_here = false;
        const auto done = [&](bool masks_too) {
            part.load(place);
            is_here = part.here(place, flag) == part.kAll;
            return is_here || (masks_too && __any_sync(kFullWarp, is_masked(c, from.source)));
        };
        if (!look_until(c, done) && lane == 0) mask_or_report(c, from.source, GpuPhase::kLanes, call, 0);
        weight = lane_of_head(part.values[0]).weight;
        return is_here;
    }

    // Tokens go round all ranks. Each rank begins with the next one, so that not all push to the same rank at once.
    __device__ SourceToken token_at(int nth) const {
        const int source = (nth + c.rank + 1) % config.num_ranks;
        return {source, nth / config.num_ranks};
    }

    // Find the rows of a received token; there are none if its rank is masked. Thread r has rank r's num_tokens. One warp calls it.
    __device__ void find_rows(int nth, int num_tokens, TokenRows& out) const {
        const SourceToken to = token_at(nth);
        LowLatencyRow entry{-1, 0.0f};
        if (nth < config.capacity() && lane < config.num_topk)
            entry = in_handle<LowLatencyRow>(p, handle.rows)[(to.source * config.num_max_tokens + to.token) * config.num_topk + lane];
        if (to.token >= __shfl_sync(kFullWarp, num_tokens, to.source) || is_masked(c, to.source)) entry.row = -1;
        unsigned lanes = __ballot_sync(kFullWarp, entry.row >= 0);
        if constexpr (kWeighted) {
            if (lanes != 0 && !wait_weights(to, entry.weight)) lanes = 0, entry.row = -1;
        }
        const int n = __popc(lanes & ((1u << lane) - 1));
        if (entry.row >= 0) out.rows[n] = entry.row, out.weights[n] = entry.weight;
        if (lane == 0) out.num = __popc(lanes);
    }

    __device__ void send_sum(const SourceToken& to, const TokenRows& token, bool is_loaded, const TokenRows& next) const {
        Staged& staged = *shared_memory<Staged>();
        const int piece = warp * 32 * kBatch + lane;
        const bool sums = threadIdx.x < kSummingThreads;
#pragma unroll 1
        for (int begin = 0; begin < num_sent; begin += kSentPieces) {
            Sum sum = {};
            if (sums) sum_rows(sum, token, begin / kSentPieces * kBatchPieces + piece, is_loaded && begin == 0);
            if (begin != 0) __syncthreads();  // the pieces staged before must have been sent
            if (sums) stage(staged, piece, sum);
            __syncthreads();
            if (sums && begin + kSentPieces >= num_sent) load_rows(next, 0, piece);
            const int first_part = begin / kLinePieces * kPartsOfLine;
            staged.push(c, 0, config.num_ranks, 1u << to.source, min(kSentPieces, num_sent - begin), kQuantized, flag,
                        [&](int rank) { return Turn(c, rank, call).row(c.rank, to.token) + first_part; });
        }
    }

    __device__ void stage(Staged& staged, int piece, const Sum& sum) const {
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
            const int at = piece + 32 * j;
            if constexpr (!kQuantized) {
                staged.pieces[at] = Values::store(sum[j]);
            } else {
                constexpr int kLanes = kScaleBlock / Values::kCount;  // threads that share a scale
                const Fp8Block block(largest_of<kLanes>(sum[j]), false);
                reinterpret_cast<typename Columns::Raw*>(staged.pieces)[at] = block.store(sum[j]).raw;
                if (lane % kLanes == 0) staged.scales[at / kLanes] = block.scale;
            }
        }
    }

    // ---- receiving ----

    // A task covers as many parts of a token's sums as the block has threads; each thread takes one.
    __device__ void receive() const {
        const int num_parts = parts_of(num_sent), num_tasks = (num_parts + kThreads - 1) / kThreads;
        unsigned ranks = ranks_of(blockIdx.x / num_tasks);
        if (warp == 0) meet_along();
        __syncthreads();
#pragma unroll 1
        for (int task = blockIdx.x; task < p.num_tokens * num_tasks; task += gridDim.x) {
            const int token = task / num_tasks, part = task % num_tasks * kThreads + warp * 32;
            if (task != static_cast<int>(blockIdx.x)) ranks = ranks_of(token);
            if (part < num_parts) add_up(token, ranks & shared().came, part + lane, num_parts);
        }
    }

    // Returns the bit mask of the ranks that have rows of the token.
    __device__ unsigned ranks_of(int token) const { return token < p.num_tokens ? in_handle<unsigned>(p, handle.rank_masks)[token] : 0; }

    // Over nodes only ranks that bring weights meet here, and those of this node come first. The threads of a warp wait together, so a rank
    // of this node that refuses or is late must be named before ranks whose words it would have passed on.
    __device__ Sources meet_all(WorkspaceWords words) const {
        if constexpr (!kWeighted) return meet(c, words, flag, p.statistics, blockIdx.x == 0);
        const unsigned node = ranks_of_node(c);
        Sources all{0, 0};
#pragma unroll 1
        for (unsigned among = node;; among = ~node) {
            const Sources sources = meet(c, words, flag, p.statistics, blockIdx.x == 0, among);
            all = {all.came | sources.came, all.num_tokens + sources.num_tokens};
            if (among != node || c.ranks_per_node == static_cast<unsigned>(config.num_ranks)) return all;
        }
    }
    // Wait until all ranks have come, and report those that combine for another dispatch. One warp calls it.
    __device__ void meet_along() const {
        const unsigned long long our_dispatch = dispatch_of(p);
        const WorkspaceWords words{c, call};
        Sources sources = meet_all(words);
        if (c.masks_stalled) sources = agreed(c, words, flag, sources);
        const bool is_same = sources.num_tokens == LowLatencyWhat::value_in(our_dispatch), came = (sources.came >> lane & 1) != 0;
        if (came && !is_same) report(c, kMismatch, lane, GpuPhase::kCombineRows, static_cast<long long>(our_dispatch), sources.num_tokens);
        const unsigned ranks = __ballot_sync(kFullWarp, came && is_same);
        if (lane == 0) shared().came = ranks;
    }

    // Add part `i` of the token's sums from `ranks`, in rank order. A rank that is masked meanwhile is left out. One warp calls it.
    __device__ void add_up(int token, unsigned ranks, int i, int num_parts) const {
        float sum[kColumns] = {};
#pragma unroll 1
        for (unsigned rest = ranks; rest != 0;) {
            int rank[kRanksAtOnce];
#pragma unroll
            for (int n = 0; n < kRanksAtOnce; ++n, rest &= rest - 1) rank[n] = __ffs(rest) - 1;
            add_parts(sum, token, rank, i, num_parts);
        }
        if (ends_line() || piece_of(i) >= num_sent) return;
        uint4* const to = pieces(p.combined_x + token * row_bytes) + piece_of(i) * (kColumns / Values::kCount);
#pragma unroll
        for (int j = 0; j < kColumns / Values::kCount; ++j) to[j] = Values::store(sum + j * Values::kCount);
    }

    // Unused places of `rank` hold -1.
    __device__ void add_parts(float (&sum)[kColumns], int token, const int (&rank)[kRanksAtOnce], int i, int num_parts) const {
        const Turn turn(c, c.rank, call);
        const Places<kRanksAtOnce> place([&](int n) { return rank[n] >= 0 && i < num_parts ? turn.row(rank[n], token) + i : nullptr; });
        Parts<kRanksAtOnce> parts;
        unsigned here = 0;
        const auto done = [&](bool masks_too) {
            parts.load(place);
            here = parts.here(place, flag);
            if (here == parts.kAll || !masks_too) return here == parts.kAll;
            const unsigned masks = __reduce_or_sync(kFullWarp, masks_of(c));
#pragma unroll
            for (int n = 0; n < kRanksAtOnce; ++n)
                if ((here >> n & 1) == 0 && (masks >> rank[n] & 1) == 0) return false;
            return true;
        };
        const bool is_done = look_until(c, done);
#pragma unroll
        for (int n = 0; n < kRanksAtOnce; ++n) {
            if (rank[n] >= 0 && (here >> n & 1) != 0) add_part<kType, kQuantized>(sum, parts.values[n], i);
            if (!is_done && (here >> n & 1) == 0 && lane == 0) mask_or_report(c, rank[n], GpuPhase::kCombineRows, call, 0);
        }
    }
};

template <DType kType, bool kQuantized, bool kWeighted>
__global__ void __launch_bounds__(kThreads, 2) low_latency_combine(const __grid_constant__ Launch l) {
    let_next_kernel_start();
    wait_for_kernel_before();
    const LowLatencyContext& c = l.context;
    const unsigned long long call = l.sends ? next_call(c) : *reinterpret_cast<const unsigned long long*>(l.call.call);
    const Kernel<kType, kQuantized, kWeighted> kernel(l, call);
    if (l.sends) {
        if (blockIdx.x == 0 && l.enters) kernel.enter();
        kernel.send();
    }
    if (l.receives) kernel.receive();
    if (l.sends) end_send(c, call);
}

}  // namespace

int64_t low_latency_combine_shared_bytes() { return sizeof(Shared); }

int low_latency_combine_blocks_per_multiprocessor() {
    return blocks_per_multiprocessor<low_latency_combine<DType::kBFloat16, false, false>>(kThreads, sizeof(Shared));
}

void launch_low_latency(Launch l, void* stream) {
    l.call.what.operation = LowLatencyOperation::kCombine;
    if (!l.sends) {
        const int64_t threads = kPartsOfLine * GpuLowLatencyLayout::lines_of(l.context.config.hidden / 4);  // upper bound for one token
        l.num_blocks = static_cast<int>(std::clamp<int64_t>(l.call.num_tokens * ((threads + kThreads - 1) / kThreads), 1, l.num_blocks));
    }
    with_types(l.call.what, [&](auto dtype, auto fp8) {
        const auto start = [&](auto weighted) {
            launch<low_latency_combine<dtype.value, fp8.value, weighted.value>>("low_latency_combine", l.num_blocks, kThreads,
                                                                                sizeof(Shared), l, stream, starts_early());
        };
        l.call.what.has_weights ? start(std::true_type{}) : start(std::false_type{});
    });
}

}  // namespace deepep_moe

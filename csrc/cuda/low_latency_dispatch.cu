// Low-latency dispatch: one kernel for the whole call, or two for its halves. No plan, no host.
//
//   sending      a block for each destination enters the call there and stores how many tokens its experts get;
//                the other blocks push rows, a token at a time: head (place among this rank's tokens of each expert, weight) and row,
//                quantized on the way, in lines of 128 bytes that bring their flags
//   receiving    every block, a warp a token: waits for all ranks' counts, then for the token's head, and places its rows;
//                then half of the block copies each row, waiting for its lines
//
// One warp computes what all warps of a block need, because the kernel is bound by instruction issue.
#include <algorithm>

#include "cuda/device/fp8.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/device/low_latency_places.cuh"
#include "cuda/device/low_latency_received.cuh"
#include "cuda/launch.h"

namespace deepep_moe {
namespace {

using Launch = LowLatencyLaunch<LowLatencyDispatchParams>;

constexpr int kThreads = tuning::kLowLatencyThreads, kWarps = kThreads / 32;
constexpr int kColumns = 16;                                            // that become a piece, of a row that is quantized
constexpr int kStagingThreads = kThreads / kPartsOfLine * kLinePieces;  // 8 parts of a line are 7 pieces

// In shared memory.
struct Shared {
    StagedPieces<2 * kStagingThreads> staged[2];  // by turns: one is stored from while the other is written to
    unsigned ranks[2];                            // that each goes to
    unsigned came, lacking;                       // ranks that have entered the call, and whose counts have not come,
    int num_tokens[kLowLatencyMaxRanks], most;    // how many tokens they have, and how many at most
    TokenRows tokens[kWarps];
    int more[];  // counts of each rank for the local experts, then Marks
};

template <DType kType, bool kQuantized>
struct Kernel {
    static constexpr int kPieces = kQuantized ? 1 : 2;  // of a row that is sent, of a thread at once
    static constexpr int kParts = 2;                    // of a row that is received, likewise
    static constexpr int kGroups = 2;                   // of warps that receive
    static constexpr int kStagedPieces = kPieces * kStagingThreads;
    using Staged = StagedPieces<kStagedPieces>;  // not more than Shared::staged
    static constexpr int kGivenBytes =
        kQuantized ? kColumns * static_cast<int>(element_bytes(kType)) : 16;  // of x, that become 16 on the way

    const LowLatencyContext& c;
    const LowLatencyConfig& config;
    const LowLatencyDispatchParams& p;
    const unsigned long long call, flag;  // of this rank in the call, its value 0
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_local;
    const int64_t x_bytes, row_bytes;  // of a row as it is given, and as it is received, without its scales
    const int num_pieces;              // of that
    const int num_senders;             // blocks that send before they receive

    __device__ Kernel(const Launch& l, unsigned long long call)
        : c(l.context),
          config(c.config),
          p(l.call),
          call(call),
          flag(p.what.flag(call, 0)),
          num_local(config.num_local_experts),
          x_bytes(config.hidden * (16 / Piece<kType>::kCount)),
          row_bytes(kQuantized ? config.hidden : x_bytes),
          num_pieces(static_cast<int>(row_bytes / 16)),
          num_senders(l.sends ? min(static_cast<int>(gridDim.x), config.num_ranks + p.num_tokens) : 0) {}

    __device__ LowLatencyHandleLayout handle() const { return LowLatencyHandleLayout(config); }
    template <class T>
    __device__ T* in_handle(int64_t offset) const {
        return reinterpret_cast<T*>(p.handle + offset);
    }

    __device__ static Shared& shared() { return *shared_memory<Shared>(); }
    __device__ static Staged& staged(int turn) { return reinterpret_cast<Staged&>(shared().staged[turn]); }
    __device__ Marks marks() const { return Marks(shared().more + config.num_experts, p.num_tokens); }

    // ---- sending ----

    // The first blocks send counts, one for each destination, the others rows.
    __device__ void send() const {
        const int block = static_cast<int>(blockIdx.x) - config.num_ranks;
        if (block < 0) {
            const FirstMarks experts(c, p);
            enter(blockIdx.x);
            const bool accepted = find_places(experts);
            if (!accepted && threadIdx.x == 0) fail();
            send_counts(blockIdx.x, accepted);
        } else if (block < p.num_tokens) {
            send_rows(block, static_cast<int>(gridDim.x) - config.num_ranks);
        }
    }

    // No combine may go along the handle: what a block has not received it has not placed.
    __device__ void fail() const { *in_handle<unsigned long long>(handle().failed) = call ^ c.failed; }

    // Every word is its own flag.
    __device__ void enter(int to) const {
        if (threadIdx.x != 0) return;
        if (!is_masked(c, to)) store_relaxed(Turn(c, to, call).entered(c.rank), flag + p.num_tokens);
        if (to == 0) *in_handle<unsigned long long>(0) = call;
    }

    __device__ void send_counts(int to, bool accepted) const {
        const Turn there(c, to, call);
        const bool masked = is_masked(c, to);
        LowLatencyWhat what = p.what;
        what.is_refused = !accepted;
        const unsigned long long told = what.flag(call, 0);
        if (!accepted) tell_reason(to, masked);
#pragma unroll 1
        for (int expert = threadIdx.x; expert < num_local; expert += kThreads) {
            const int count = marks().count(to * num_local + expert);
            if (!masked)
                store_relaxed(there.counts(c.rank) + expert, told + count);
            else if (count > 0)
                atomicAdd(reinterpret_cast<unsigned long long*>(LowLatencyStatistics(config, p.statistics).num_dropped), count);
        }
    }

    // All threads, of which each may have seen another `masked`.
    __device__ void tell_reason(int to, bool masked) const {
        if (threadIdx.x == 0 && !masked) {
            LowLatencyReason* reason = reason_at(c, to);
            reason->why = refusal();
            reason->text[0] = '\0';
            __threadfence_system();
        }
        __syncthreads();
    }

    // The head first: by the time that the row has come, its receiver knows where it belongs. All places are worked out while the first
    // token's columns are on their way.
    __device__ void send_rows(int first, int step) const {
        const FirstMarks experts(c, p);
        int turn = 0;
#pragma unroll 1
        for (int token = first; token < p.num_tokens; token += step) {
            const bool sends_head = warp == kWarps - 1;  // which has no columns
            const Lane own(*this, token, sends_head);
            unsigned ranks = 0;
#pragma unroll 1
            for (int begin = 0; begin < num_pieces; begin += kStagedPieces, turn ^= 1) {
                const Given given(*this, token, begin);
                if (token == first && begin == 0) find_places(experts);
                if (sends_head && begin == 0) shared().ranks[turn] = own.ranks();
                given.stage(*this, staged(turn));
                __syncthreads();
                if (begin == 0) ranks = shared().ranks[turn];
                if (sends_head && begin == 0) send_head(token, own, ranks);
                const int first_part = begin / kLinePieces * kPartsOfLine;
                staged(turn).push(c, ranks, min(kStagedPieces, num_pieces - begin), kQuantized, flag,
                                  [&](int to) { return Turn(c, to, call).row(c.rank, token) + first_part; });
            }
        }
    }

    // All threads. Whether something is wrong with them, a block that counts tells.
    __device__ bool find_places(const FirstMarks& experts) const {
        clear(c, marks());
        __syncthreads();
        return mark_tokens(c, p, marks(), experts);
    }

    // One of top-k: where it goes, what with, and who is masked. One warp has them.
    struct Lane {
        int expert = -1, rank = -1;
        float weight = 1.0f;
        unsigned masks = 0;

        __device__ Lane(const Kernel& k, int token, bool is_any) {
            if (!is_any) return;
            masks = __shfl_sync(kFullWarp, *static_cast<volatile unsigned*>(&k.c.state->masks), 0);  // the same for all lanes
            if (k.lane >= k.config.num_topk) return;
            const int64_t at = static_cast<int64_t>(token) * k.config.num_topk + k.lane, chosen = expert_at(k.p, at);
            if (k.p.topk_weights != nullptr) weight = k.p.topk_weights[at];
            if (chosen < 0 || chosen >= k.config.num_experts) return;
            expert = static_cast<int>(chosen);
            rank = expert / k.num_local;
        }
        // All ranks that the token goes to.
        __device__ unsigned ranks() const { return __reduce_or_sync(kFullWarp, rank < 0 ? 0u : 1u << rank) & ~masks; }
    };

    // One warp: what of the token goes where.
    __device__ void send_head(int token, const Lane& own, unsigned ranks) const {
        const int num_parts = static_cast<int>(c.layout.head_bytes / 16);
        if (lane == 0) in_handle<unsigned>(handle().rank_masks)[token] = ranks;
        LowLatencyLane out{-1, 0, own.weight};
        if (own.rank >= 0) out.index = static_cast<uint16_t>(marks().before(token, own.expert));
#pragma unroll 1
        for (int to = 0; to < config.num_ranks; ++to) {
            if ((own.masks >> to & 1) != 0) continue;
            out.expert = static_cast<int16_t>(own.rank == to ? own.expert - to * num_local : -1);
            const uint4 part = head_part(out, flag);
            store_part(Turn(c, to, call).head(c.rank, token) + lane, part, lane < num_parts);
        }
    }

    // What becomes this thread's pieces of a row on its way.
    struct Given {
        static constexpr int kLoads = kGivenBytes / 16;
        int num = 0;
        uint4 raw[kPieces][kLoads] = {};

        __device__ Given(const Kernel& k, int token, int begin) {
            if (threadIdx.x >= kStagingThreads) return;
#pragma unroll
            for (int i = 0; i < kPieces; ++i) {
                const int piece = begin + threadIdx.x + i * kStagingThreads;
                if (piece >= k.num_pieces) return;
                ++num;
                const uint4* from = pieces(k.p.x + token * k.x_bytes + piece * kGivenBytes);
#pragma unroll
                for (int load = 0; load < kLoads; ++load) raw[i][load] = from[load];
            }
        }

        __device__ void stage(const Kernel& k, Staged& staged) const {
#pragma unroll
            for (int i = 0; i < kPieces; ++i) {
                uint4 value = raw[i][0];
                const int at = threadIdx.x + i * kStagingThreads;
                if constexpr (kQuantized) {
                    float x[kColumns];
#pragma unroll
                    for (int load = 0; load < kLoads; ++load) Piece<kType>::load(raw[i][load], x + load * Piece<kType>::kCount);
                    const Fp8Block block(largest_of<kPiecesOfBlock>(x), k.p.what.is_rounded);
                    value = block.store(x).raw;
                    if (i < num && at % kPiecesOfBlock == 0) staged.scales[at / kPiecesOfBlock] = block.scale;
                }
                if (i < num) staged.pieces[at] = value;
            }
        }
    };

    // ---- receiving ----

    // The tokens of a block, kWarps at a time: a warp finds the rows of each, then all copy, a group of warps a token, so that the next
    // one's parts are on their way. Which tokens they are needs the most of a rank; until all ranks have told, those of this one.
    __device__ void receive() const {
        const int begin = first_token(), step = static_cast<int>(gridDim.x);
        int most = max(1, p.num_tokens), end = static_cast<int>(config.capacity());
#pragma unroll 1
        for (int first = begin; first < end; first += kWarps * step) {
            const int own = first + warp * step;
            bool is_loaded = own < min(end, config.num_ranks * most);
            Parts<1> head;
            if (is_loaded) head.load(PartsOfHead(*this, token_at(own, most)));
            if (first == begin) {
                wait_sources(begin == 0);
                end = config.num_ranks * shared().most;
                is_loaded &= shared().most == most;
                most = max(1, shared().most);
            }
            const SourceToken from = token_at(own, most);
            if (lane == 0) shared().tokens[warp].num = 0;
            if (own < end) find_rows(from, head, is_loaded, shared().tokens[warp]);
            __syncthreads();
            const int num_groups = first + step < end ? kGroups : 1;
#pragma unroll 1
            for (int n = warp % num_groups; n < kWarps && first + n * step < end; n += num_groups)
                if (shared().tokens[n].num != 0) copy(token_at(first + n * step, most), shared().tokens[n], num_groups);
            __syncthreads();
        }
    }

    // Blocks that send nothing take the first ones.
    __device__ int first_token() const {
        const int block = static_cast<int>(blockIdx.x) - num_senders;
        return block < 0 ? block + static_cast<int>(gridDim.x) : block;
    }

    // The n-th of `most` of each rank, in the order in which their rows come: this rank's own, then those of the rank that pushes here
    // first.
    __device__ SourceToken token_at(int nth, int most) const {
        const int turn = nth / most, source = c.rank - turn;
        return {source < 0 ? source + config.num_ranks : source, nth - turn * most};
    }

    // Until all ranks have come, with their counts. tells: it is the block that passes them on, and keeps statistics.
    __device__ void wait_sources(bool tells) const {
        shared().lacking = 0;
        __syncthreads();
        if (warp == 0)
            store_sources(meet(c, flag, p.statistics, tells));
        else
            wait_counts(c, flag, shared().more, &shared().lacking, threadIdx.x - 32, kThreads - 32);
        __syncthreads();
        if (threadIdx.x == 0 && lacks_a_rank() && gave_up(c)) fail();
        if (c.masks_stalled) agree_across_blocks();
        if (tells) publish_counts();
    }

    __device__ bool lacks_a_rank() const {
        const unsigned all = kFullWarp >> (32 - config.num_ranks), here = shared().came & ~shared().lacking;
        return here != all && (here | *static_cast<volatile unsigned*>(&c.state->masks)) != all;
    }

    // One warp.
    __device__ void store_sources(const Sources& sources) const {
        const unsigned most = __reduce_max_sync(kFullWarp, static_cast<unsigned>(sources.num_tokens));
        if (lane == 0) shared().came = sources.came, shared().most = static_cast<int>(most);
        if (lane < config.num_ranks) shared().num_tokens[lane] = sources.num_tokens;
    }

    // A rank has come for all blocks or for none: rows of one whose counts are not known would lie where those of another belong.
    __device__ void agree_across_blocks() const {
        if (warp == 0)
            store_sources(agreed(c, flag, {shared().came & ~shared().lacking, lane < config.num_ranks ? shared().num_tokens[lane] : 0}));
        __syncthreads();
        read_counts_again(c, flag, shared().more, shared().came & shared().lacking);
        __syncthreads();
    }

    __device__ void publish_counts() const {
        if (threadIdx.x < config.num_ranks) in_handle<int32_t>(handle().num_tokens)[threadIdx.x] = shared().num_tokens[threadIdx.x];
#pragma unroll 1
        for (int expert = threadIdx.x; expert < num_local; expert += kThreads) {
            const int num_tokens = tokens_before(c, shared().more, shared().came, config.num_ranks, expert);
            p.num_recv_tokens_per_expert[expert] = num_tokens;
            atomicAdd(reinterpret_cast<unsigned long long*>(LowLatencyStatistics(config, p.statistics).num_tokens_per_expert) + expert,
                      num_tokens);
        }
    }

    // One warp: where the rows of a token go, for the block and the handle. is_loaded: its head is, if it has come.
    __device__ void find_rows(const SourceToken& from, Parts<1>& head, bool is_loaded, TokenRows& out) const {
        if (from.token >= shared().num_tokens[from.source]) return;
        LowLatencyLane there{-1, 0, 0.0f};
        if (wait(head, PartsOfHead(*this, from), from.source, is_loaded)) there = lane_of_head(head.values[0]);
        if (lane >= config.num_topk) there.expert = -1;
        int row = -1;
        if (there.expert >= 0)
            row = there.expert * static_cast<int>(config.capacity()) +
                  tokens_before(c, shared().more, shared().came, from.source, there.expert) + there.index;
        LowLatencyRow* const rows =
            in_handle<LowLatencyRow>(handle().rows) + (from.source * config.num_max_tokens + from.token) * config.num_topk;
        if (lane < config.num_topk) rows[lane] = {row, there.weight};
        const unsigned lanes = __ballot_sync(kFullWarp, row >= 0);
        const int nth = __popc(lanes & ((1u << lane) - 1));
        if (row >= 0) {
            out.rows[nth] = row * row_bytes;
            out.scales[nth] = row + there.expert * (num_scale_words(config, p.what.is_rounded) - 1) * config.capacity();
        }
        if (lane == 0) out.num = __popc(lanes);
    }

    // All lanes of a warp, until all parts are there; false where they are given up. is_loaded: they are, if not yet there.
    template <int kCount, class Place>
    __device__ bool wait(Parts<kCount>& parts, const Place& place, int source, bool is_loaded) const {
        bool are_here = false;
        const auto done = [&](bool masks_too) {
            if (!is_loaded) parts.load(place);
            is_loaded = false;
            are_here = parts.here(place, flag) == parts.kAll;
            return are_here || (masks_too && __any_sync(kFullWarp, is_masked(c, source)));
        };
        if (!look_until(c, done) && lane == 0) {
            mask_or_report(c, source, GpuPhase::kDispatchRows, call, 0);
            if (gave_up(c)) fail();
        }
        return are_here;
    }

    // Where a warp's parts of a head are, and of a row, from `first` on.
    struct PartsOfHead {
        const uint4* const head;
        const bool is_any;
        __device__ PartsOfHead(const Kernel& k, const SourceToken& from)
            : head(Turn(k.c, k.c.rank, k.call).head(from.source, from.token) + k.lane), is_any(k.lane < k.c.layout.head_bytes / 16) {}
        __device__ const uint4* operator()(int) const { return is_any ? head : nullptr; }
    };
    struct PartsOfRow {
        const uint4* const row;
        const int first, step, num;
        __device__ PartsOfRow(const Kernel& k, const SourceToken& from, int first, int step)
            : row(Turn(k.c, k.c.rank, k.call).row(from.source, from.token)),
              first(first + k.lane),
              step(step),
              num(parts_of(k.num_pieces)) {}
        __device__ int nth(int i) const { return first + i * step; }
        __device__ const uint4* operator()(int i) const { return nth(i) < num ? row + nth(i) : nullptr; }
    };

    // A group of warps, of which this is one. What does not come is zeros.
    __device__ void copy(const SourceToken& from, const TokenRows& rows, int num_groups) const {
        const int step = kThreads / num_groups;
#pragma unroll 1
        for (int first = warp / num_groups * 32; first < parts_of(num_pieces); first += kParts * step) {
            const PartsOfRow place(*this, from, first, step);
            Parts<kParts> parts;
            const bool are_here = wait(parts, place, from.source, false);
#pragma unroll
            for (int i = 0; i < kParts; ++i) {
                const uint4 part = are_here ? parts.values[i] : make_uint4(0, 0, 0, 0);
                const int piece = piece_of(place.nth(i));
                if (!ends_line() && piece < num_pieces) write_piece(p, rows, piece, part);
                if (kQuantized) write_scales(p, config, rows, lane, piece - lane % kPartsOfLine, part);
            }
        }
    }
};

template <DType kType, bool kQuantized>
__global__ void __launch_bounds__(kThreads, 2) low_latency_dispatch(const __grid_constant__ Launch l) {
    let_next_kernel_start();
    wait_for_kernel_before();
    const LowLatencyContext& c = l.context;
    const unsigned long long call = l.sends ? next_call(c) : *reinterpret_cast<const unsigned long long*>(l.call.handle);
    const Kernel<kType, kQuantized> kernel(l, call);
    if (l.sends) kernel.send();
    if (l.receives) kernel.receive();
    if (l.sends) end_send(c, call);
}

template <DType kType>
void launch_type(const Launch& l, void* stream) {
    const int64_t shared_bytes = low_latency_shared_bytes(l.context.config);
    if (l.call.what.fp8)
        launch<low_latency_dispatch<kType, true>>("low_latency_dispatch", l.num_blocks, kThreads, shared_bytes, l, stream, starts_early());
    else
        launch<low_latency_dispatch<kType, false>>("low_latency_dispatch", l.num_blocks, kThreads, shared_bytes, l, stream, starts_early());
}

}  // namespace

int64_t low_latency_shared_bytes(const LowLatencyConfig& c) {
    return static_cast<int64_t>(sizeof(Shared)) + 4 * c.num_experts * (1 + round_up(c.num_max_tokens, 32) / 32);
}

// The same for all types of rows, by __launch_bounds__.
int low_latency_blocks_per_multiprocessor(const LowLatencyConfig& c) {
    const int blocks = blocks_per_multiprocessor<low_latency_dispatch<DType::kBFloat16, false>>(kThreads, low_latency_shared_bytes(c));
    return std::min({2, blocks, low_latency_combine_blocks_per_multiprocessor()});
}

void launch_low_latency_dispatch(Launch l, void* stream) {
    l.call.what.operation = LowLatencyOperation::kDispatch;
    const int senders = l.context.config.num_ranks + std::max(1, l.call.num_tokens);
    if (!l.receives) l.num_blocks = std::min(l.num_blocks, senders);
    with_dtype(l.call.what.dtype, "rows are quantized on their way; give them as they are",
               [&](auto dtype) { launch_type<dtype.value>(l, stream); });
}

}  // namespace deepep_moe

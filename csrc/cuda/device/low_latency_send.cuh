// The sending half of a low-latency dispatch sends counts and rows to the ranks of this node, and through `Outside` to other nodes.
//
//   Some blocks    Each serves one other node or one rank of this node, and sends the counts that must come before rows.
//   All others     Send one token at a time: the row for other nodes, then head and row to the ranks of this node, in lines of 128
//                  bytes that bring their flags. A head has the weight and the place among this rank's tokens of each expert.
//
// One warp computes what all warps of a block need, because the kernel is bound by instruction issue.
#pragma once

#include "cuda/device/fp8.cuh"
#include "cuda/device/low_latency_lines.cuh"
#include "cuda/device/low_latency_places.cuh"

namespace deepep_moe {

// Lies in shared memory, before the kernel's other data.
struct SendShared {
    static constexpr int kThreads = tuning::kLowLatencyThreads;
    static constexpr int kStagingThreads = kThreads / kPartsOfLine * kLinePieces;  // 8 parts of a line are 7 pieces
    StagedPieces<2 * kStagingThreads> staged[2];  // used in turns: threads store from one while they fill the other
    unsigned ranks[2];                            // destinations of each, as a bit mask
};

// Stands for `Outside` where all ranks are of one node.
struct NobodyOutside {
    static constexpr bool kIsAny = false;
    const LowLatencyContext& c;
    __device__ int first_rank() const { return 0; }
    __device__ int num_nodes() const { return 1; }
    __device__ int num_ranks() const { return c.config.num_ranks; }
    __device__ unsigned reached(unsigned masks) const { return ~masks; }
};

// Runs the sending half of one block. The caller gives it memory for the Marks of all experts.
template <DType kType, bool kQuantized, class Outside>
struct Sender {
    static constexpr int kThreads = SendShared::kThreads, kWarps = kThreads / 32, kStagingThreads = SendShared::kStagingThreads;
    static constexpr int kTokensOfTelling = 2;          // tokens that another block sends while a block serves one node or rank
    static constexpr int kColumns = 16;                 // columns in one piece of a quantized row
    static constexpr int kPieces = kQuantized ? 1 : 2;  // pieces of a row that a thread handles at once
    static constexpr int kStagedPieces = kPieces * kStagingThreads;
    static constexpr int kGivenBytes =
        kQuantized ? kColumns * static_cast<int>(element_bytes(kType)) : 16;  // bytes of x that become one piece of 16 bytes
    using Staged = StagedPieces<kStagedPieces>;                               // not larger than SendShared::staged

    const LowLatencyContext& c;
    const LowLatencyDispatchParams& p;
    const Outside outside;
    SendShared& shared;
    const Marks marks;
    const LowLatencyConfig& config;
    const unsigned long long call, flag;  // this rank's flag in the call, with value 0
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_local;
    const int64_t x_bytes;  // bytes of a row of x
    const int num_pieces;   // pieces of a row as it travels, without its scales

    __device__ Sender(const LowLatencyContext& c, const LowLatencyDispatchParams& p, const Outside& outside, SendShared& shared,
                      void* marks, unsigned long long call)
        : c(c),
          p(p),
          outside(outside),
          shared(shared),
          marks(marks, p.num_tokens, c.config.lanes),
          config(c.config),
          call(call),
          flag(p.what.flag(call, 0)),
          num_local(config.num_local_experts),
          x_bytes(config.hidden * (16 / Piece<kType>::kCount)),
          num_pieces(static_cast<int>((kQuantized ? config.hidden : x_bytes) / 16)) {}

    __device__ void send() const {
        if constexpr (Outside::kIsAny)
            send_by_turns();
        else
            send_by_blocks();
    }

private:
    __device__ LowLatencyHandleLayout handle() const { return LowLatencyHandleLayout(config); }

    // The first blocks each send the counts for one destination; the others send rows.
    __device__ void send_by_blocks() const {
        const int block = static_cast<int>(blockIdx.x) - config.num_ranks;
        if (block < 0) {
            const FirstMarks experts(c, p);
            enter(blockIdx.x);
            const bool accepted = find_places(experts);
            if (!accepted && threadIdx.x == 0) fail();
            send_counts(blockIdx.x, accepted);
        } else if (block < p.num_tokens) {
            send_rows(block, FirstMarks(c, p), false);
        }
    }

    // A block that has served a node or a rank then sends rows too; its first token is one that the other blocks have not reached by then.
    __device__ void send_by_turns() const {
        const int num_outside = outside.num_nodes() - 1, num_tasks = this->num_tasks(), step = static_cast<int>(gridDim.x);
        const FirstMarks experts(c, p);
        const bool tells = static_cast<int>(blockIdx.x) < num_tasks;
        bool accepted = true;
        if (tells) accepted = find_places(experts);
        if (tells && blockIdx.x == 0 && threadIdx.x == 0) {
            *in_handle<unsigned long long>(p, 0) = call;
            if (!accepted) fail();
        }
#pragma unroll 1
        for (int task = blockIdx.x; task < num_tasks; task += step) {
            if (task < num_outside) {
                outside.tell(*this, task + 1, accepted);
            } else {
                const int to = outside.first_rank() + task - num_outside;
                enter(to);
                send_counts(to, accepted);
            }
        }
        if (!accepted) return;  // blocks without a task do not know of the fault; nobody reads the rows that they send
        send_rows(tells ? num_ahead() + blockIdx.x : blockIdx.x - num_tasks, experts, tells);
    }

    // For each other node and each rank of this node, one task writes the flags that say how many rows come.
    __device__ int num_tasks() const { return outside.num_nodes() - 1 + outside.num_ranks(); }
    // Return how many blocks only send rows, and how many tokens these send before a block with a task sends one.
    __device__ int num_others() const { return max(0, static_cast<int>(gridDim.x) - num_tasks()); }
    __device__ int num_ahead() const { return kTokensOfTelling * num_others(); }
    __device__ int next(int token) const {
        if constexpr (!Outside::kIsAny) return token + static_cast<int>(gridDim.x) - config.num_ranks;
        if (token + num_others() < num_ahead()) return token + num_others();
        return token < num_ahead() ? num_ahead() + static_cast<int>(blockIdx.x) : token + static_cast<int>(gridDim.x);
    }

    __device__ void fail() const { fail_handle(c, p.handle, call); }

    // Enter the call at a rank. Every word carries its own flag, so no fence is needed.
    __device__ void enter(int to) const {
        if (threadIdx.x != 0) return;
        if (!is_masked(c, to)) store_relaxed(Turn(c, to, call).entered(c.rank), flag + p.num_tokens);
        if (to == 0) *in_handle<unsigned long long>(p, 0) = call;
    }

    __device__ void send_counts(int to, bool accepted) const {
        const Turn there(c, to, call);
        const bool masked = is_masked(c, to);
        LowLatencyWhat what = p.what;
        what.is_refused = !accepted;
        const unsigned long long counts_flag = what.flag(call, 0);
        if (!accepted) {  // threads may have read different values of `masked`
            if (threadIdx.x == 0 && !masked) tell_reason(c, to, call, refusal());
            __syncthreads();
        }
#pragma unroll 1
        for (int expert = threadIdx.x; expert < num_local; expert += kThreads) {
            const int count = marks.count(to * num_local + expert);
            if (!masked)
                store_relaxed(there.counts(c.rank) + expert, counts_flag + count);
            else if (count > 0)
                drop(count);
        }
    }

public:
    __device__ void drop(int count) const {
        atomicAdd(reinterpret_cast<unsigned long long*>(LowLatencyStatistics(config, p.statistics).num_dropped), count);
    }

private:
    // For each token, the row for other nodes goes first, because its way is longer. The head goes before the row, so that the receiver
    // knows the row's place when the row comes. The first token's loads overlap the search for places (unless these are known), and each
    // next token's loads are issued before the stores of this one.
    __device__ void send_rows(int first, const FirstMarks& experts, bool knows_places) const {
        if (first >= p.num_tokens) return;
        const bool sends_head = warp == kWarps - 1;  // this warp loads no columns
        LoadedPieces loaded(*this, first, 0);
        Lane entry(*this, first, sends_head);
        if (!knows_places) find_places(experts);
        unsigned ranks = 0;
        int turn = 0, token = first, begin = 0;
#pragma unroll 1
        while (token < p.num_tokens) {
            const int count = min(kStagedPieces, num_pieces - begin);
            const bool is_last = begin + count == num_pieces;
            if (sends_head && begin == 0) shared.ranks[turn] = entry.ranks(outside);
            loaded.stage(*this, staged(turn), token, begin);
            const int next_token = is_last ? next(token) : token, next_begin = is_last ? 0 : begin + count;
            if (next_token < p.num_tokens) loaded = LoadedPieces(*this, next_token, next_begin);
            __syncthreads();
            if (begin == 0) ranks = shared.ranks[turn];
            if constexpr (Outside::kIsAny) {
                if (is_last) outside.put(*this, token, ranks);
            }
            if (sends_head && begin == 0) send_head(token, entry, ranks);
            if (is_last && next_token < p.num_tokens) entry = Lane(*this, next_token, sends_head);
            const int first_part = begin / kLinePieces * kPartsOfLine;
            staged(turn).push(c, outside.first_rank(), outside.num_ranks(), ranks, count, kQuantized, flag,
                              [&](int to) { return Turn(c, to, call).row(c.rank, token) + first_part; });
            token = next_token, begin = next_begin;
            turn ^= 1;
        }
    }

    __device__ Staged& staged(int turn) const { return reinterpret_cast<Staged&>(shared.staged[turn]); }

    // Find all tokens' places. Returns false if topk_idx has a fault, of which the blocks that send counts tell. All threads call it.
    __device__ bool find_places(const FirstMarks& experts) const {
        clear(c, marks);
        __syncthreads();
        return mark_tokens(c, p, marks, experts);
    }

    // Holds one top-k entry: its expert, rank and weight, and the masked ranks. Only one warp has them.
    struct Lane {
        int expert = -1, rank = -1;
        float weight = 1.0f;
        unsigned masks = 0;

        __device__ Lane(const Sender& s, int token, bool is_any) {
            if (!is_any) return;
            masks = masks_of(s.c);
            if (s.lane >= s.config.num_topk) return;
            const int64_t at = static_cast<int64_t>(token) * s.config.num_topk + s.lane, chosen = expert_at(s.p, at);
            if (s.p.topk_weights != nullptr) weight = s.p.topk_weights[at];
            if (chosen < 0 || chosen >= s.config.num_experts) return;
            expert = static_cast<int>(chosen);
            rank = expert / s.num_local;
        }
        // Returns all ranks that the token goes to, by the masks that the warp's first thread has read.
        __device__ unsigned ranks(const Outside& outside) {
            masks = __shfl_sync(kFullWarp, masks, 0);
            return __reduce_or_sync(kFullWarp, rank < 0 ? 0u : 1u << rank) & outside.reached(masks);
        }
    };

    // Send each rank of this node its entries of the token. One warp calls it.
    __device__ void send_head(int token, const Lane& entry, unsigned ranks) const {
        const int num_parts = static_cast<int>(c.layout.head_bytes / 16), first_rank = outside.first_rank();
        if (lane == 0) in_handle<unsigned>(p, handle().rank_masks)[token] = ranks;
        LowLatencyLane out{-1, 0, entry.weight};
        if (entry.rank >= 0) out.index = static_cast<uint16_t>(marks.before(token, entry.expert));
#pragma unroll 1
        for (int to = first_rank; to < first_rank + outside.num_ranks(); ++to) {
            if ((entry.masks >> to & 1) != 0) continue;
            out.expert = static_cast<int16_t>(entry.rank == to ? entry.expert - to * num_local : -1);
            const uint4 part = head_part(out, flag);
            store_part(Turn(c, to, call).head(c.rank, token) + lane, part, lane < num_parts);
        }
    }

    // Holds the part of a row that this thread loads. `stage` converts it to fp8 if asked, and puts it into shared memory.
    struct LoadedPieces {
        static constexpr int kLoads = kGivenBytes / 16;
        int num = 0;
        uint4 raw[kPieces][kLoads] = {};

        __device__ LoadedPieces(const Sender& s, int token, int begin) {
            if (threadIdx.x >= kStagingThreads) return;
#pragma unroll
            for (int i = 0; i < kPieces; ++i) {
                const int piece = begin + threadIdx.x + i * kStagingThreads;
                if (piece >= s.num_pieces) return;
                ++num;
                const uint4* from = pieces(s.p.x + token * s.x_bytes + piece * kGivenBytes);
#pragma unroll
                for (int load = 0; load < kLoads; ++load) raw[i][load] = from[load];
            }
        }

        __device__ void stage(const Sender& s, Staged& staged, int token, int begin) const {
#pragma unroll
            for (int i = 0; i < kPieces; ++i) {
                uint4 value = raw[i][0];
                const int at = threadIdx.x + i * kStagingThreads;
                if constexpr (kQuantized) {
                    float x[kColumns];
#pragma unroll
                    for (int load = 0; load < kLoads; ++load) Piece<kType>::load(raw[i][load], x + load * Piece<kType>::kCount);
                    const Fp8Block block(largest_of<kPiecesOfBlock>(x), s.p.what.is_rounded);
                    value = block.store(x).raw;
                    if (i < num && at % kPiecesOfBlock == 0) staged.scales[at / kPiecesOfBlock] = block.scale;
                    if constexpr (Outside::kIsAny) {
                        if (i < num && at % kPiecesOfBlock == 0) s.outside.keep_scale(s, token, (begin + at) / kPiecesOfBlock, block.scale);
                    }
                }
                if (i < num) staged.pieces[at] = value;
                if constexpr (Outside::kIsAny) {
                    if (i < num) s.outside.keep_piece(s, token, begin + at, value);
                }
            }
        }
    };
};

}  // namespace deepep_moe

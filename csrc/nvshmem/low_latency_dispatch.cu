// Low-latency dispatch over nodes: two kernels before the one of a node that receives (csrc/cuda/low_latency_dispatch.cu).
//
//   send      this rank's tokens: to each other node a message and the rows that cross, packed, a put a few rows; to the ranks of its own
//             node as in one node. It waits for nobody.
//   forward   with the hook: what the rail has brought goes on to the ranks of this node, as if the tokens' rank had sent it
//
// So the kernel that receives sees as many sources as there are ranks, and writes what it would with all of them in one node.
#include <nvshmem.h>
#include <nvshmemx.h>

#include "cuda/device/fp8.cuh"
#include "cuda/device/low_latency_places.cuh"
#include "nvshmem/low_latency.h"
#include "nvshmem/low_latency_rail.cuh"

namespace deepep_moe {
namespace {

using Launch = LowLatencyRailDispatch;

constexpr int kThreads = tuning::kLowLatencyThreads, kWarps = kThreads / 32;
constexpr int kStagedPieces = kThreads / kPartsOfLine * kLinePieces;
constexpr int kRows = kLowLatencyRailRows;

struct Shared {
    StagedPieces<kStagedPieces> staged;
    unsigned ranks;        // of this node, that a token goes to
    int of_warps[kWarps];  // tokens that cross
    int tokens[kRows];     // of a chunk
    bool is_here;
    LowLatencyReason reason;  // of a refusal of this rank
    int marks[];
};

// The tokens of one rank, as the ranks of this node are told.
struct Share {
    int source;
    LowLatencyDispatchParams p;  // its routing
};

template <bool kQuantized>
struct Kernel {
    const Launch& l;
    const RailCallMemory m;
    const LowLatencyContext& c;
    const LowLatencyConfig& config;
    const LowLatencyDispatchParams& p;
    const RailHandle handle;
    const unsigned long long call, flag;  // of this rank in the call, its value 0
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_topk, num_local;
    const int64_t x_bytes, row_bytes;  // of a row as it is given, and as it crosses
    const int num_pieces;              // of the latter, without scales

    __device__ Kernel(const Launch& l, unsigned long long call)
        : l(l),
          m(l.rail, call),
          c(l.rail.context),
          config(c.config),
          p(l.call),
          handle(l.rail, l.call.handle),
          call(call),
          flag(p.what.flag(call, 0)),
          num_topk(config.num_topk),
          num_local(config.num_local_experts),
          x_bytes(config.hidden * (p.what.dtype == DType::kFloat32 ? 4 : 2)),
          row_bytes(kQuantized ? round_up(config.hidden + 4 * (config.hidden / kScaleBlock), 16) : x_bytes),
          num_pieces(static_cast<int>((kQuantized ? config.hidden : x_bytes) / 16)) {}

    __device__ static Shared& shared() { return *shared_memory<Shared>(); }
    __device__ static StagedPieces<kStagedPieces>& staged() { return shared().staged; }
    __device__ Marks marks(const Share& s) const { return Marks(shared().marks, s.p.num_tokens); }
    __device__ unsigned masks() const { return *static_cast<volatile unsigned*>(&c.state->masks); }

    // ---- rows, a batch of pieces in shared memory ----

    struct PieceOfRow {
        uint4 value;
        float scale;  // of its block
    };

    // Lanes of a block of columns, all of them: what crosses of a row of x. is_any: this lane has a piece.
    template <DType kType>
    __device__ PieceOfRow given(int token, int piece, bool is_any) const {
        constexpr int kColumns = kQuantized ? 16 : Piece<kType>::kCount, kLoads = kColumns / Piece<kType>::kCount;
        const uint4* const from = pieces(p.x + token * x_bytes) + piece * kLoads;
        uint4 raw[kLoads] = {};
#pragma unroll
        for (int load = 0; load < kLoads; ++load)
            if (is_any) raw[load] = from[load];
        if constexpr (kQuantized) {
            float x[kColumns];
#pragma unroll
            for (int load = 0; load < kLoads; ++load) Piece<kType>::load(raw[load], x + load * Piece<kType>::kCount);
            const Fp8Block block(largest_of<kPiecesOfBlock>(x), p.what.is_rounded);
            return {block.store(x).raw, block.scale};
        } else {
            return {raw[0], 0.0f};
        }
    }

    template <DType kType>
    __device__ void stage_given(int token, int begin) const {
        const int at = static_cast<int>(threadIdx.x);
        if (at >= kStagedPieces) return;
        const PieceOfRow piece = given<kType>(token, begin + at, begin + at < num_pieces);
        staged().pieces[at] = piece.value;
        if (kQuantized && at % kPiecesOfBlock == 0) staged().scales[at / kPiecesOfBlock] = piece.scale;
    }

    __device__ void stage_arrived(const std::byte* row, int begin) const {
        const int piece = begin + static_cast<int>(threadIdx.x);
        if (threadIdx.x >= kStagedPieces || piece >= num_pieces) return;
        staged().pieces[threadIdx.x] = pieces(row)[piece];
        if (kQuantized && threadIdx.x % kPiecesOfBlock == 0)
            staged().scales[threadIdx.x / kPiecesOfBlock] = reinterpret_cast<const float*>(row + config.hidden)[piece / kPiecesOfBlock];
    }

    // All threads: stage(begin) for each batch, then use(begin).
    template <class Stage, class Use>
    __device__ void for_batches(const Stage& stage, const Use& use) const {
#pragma unroll 1
        for (int begin = 0; begin < num_pieces; begin += kStagedPieces) {
            stage(begin);
            __syncthreads();
            use(begin);
            __syncthreads();
        }
    }

    // ---- to the ranks of this node ----

    // All threads. False: something is wrong with topk_idx, and is reported.
    __device__ bool find_places(const Share& s) const {
        __syncthreads();
        clear(c, marks(s));
        __syncthreads();
        const FirstMarks experts(c, s.p);
        return mark_tokens(c, s.p, marks(s), experts);
    }

    // All threads: the entry of a share's rank, and how many of its tokens go to each expert of rank `to` of this node. told: the words.
    __device__ void send_counts(const Share& s, int to, unsigned long long entry, unsigned long long told, bool counts,
                                const LowLatencyReason* reason) const {
        const int rank = m.first_rank() + to;
        const bool masked = is_masked(c, rank);
        const Turn there(c, rank, call);
        if (reason != nullptr && !masked) {
            if (threadIdx.x == 0) *reinterpret_cast<LowLatencyReason*>(c.workspaces[rank] + c.layout.reason_of(s.source)) = *reason;
            __threadfence_system();
            __syncthreads();
        }
        if (threadIdx.x == 0 && !masked) store_relaxed(there.entered(s.source), entry);
#pragma unroll 1
        for (int expert = threadIdx.x; expert < num_local; expert += kThreads) {
            const int count = counts ? marks(s).count(rank * num_local + expert) : 0;
            if (!masked)
                store_relaxed(there.counts(s.source) + expert, told + count);
            else if (s.source == c.rank)
                drop(count);
        }
    }

    __device__ void drop(int count) const {
        if (count > 0) atomicAdd(reinterpret_cast<unsigned long long*>(LowLatencyStatistics(config, p.statistics).num_dropped), count);
    }

    // One warp: where a token of the share goes in this node. Returns the bits of its ranks.
    __device__ unsigned send_head(const Share& s, int token) const {
        const int num_parts = static_cast<int>(c.layout.head_bytes / 16), first = m.first_rank();
        const unsigned masked = __shfl_sync(kFullWarp, masks(), 0) >> first;
        int to = -1;
        LowLatencyLane out{-1, 0, 1.0f};
        int64_t expert = -1;
        if (lane < num_topk) {
            const int64_t at = static_cast<int64_t>(token) * num_topk + lane;
            expert = expert_at(s.p, at);
            if (s.p.topk_weights != nullptr) out.weight = s.p.topk_weights[at];
        }
        if (is_there(expert, l.rail.node)) {
            to = static_cast<int>(expert) / num_local - first;
            out.index = static_cast<uint16_t>(marks(s).before(token, static_cast<int>(expert)));
        }
#pragma unroll 1
        for (int rank = 0; rank < l.rail.ranks_per_node; ++rank) {
            if ((masked >> rank & 1) != 0) continue;
            out.expert = static_cast<int16_t>(to == rank ? expert - (first + rank) * num_local : -1);
            const uint4 part = head_part(out, flag);
            store_part(Turn(c, first + rank, call).head(s.source, token) + lane, part, lane < num_parts);
        }
        return __reduce_or_sync(kFullWarp, to < 0 ? 0u : 1u << to) & ~masked;
    }

    // All threads: head and row of a token. kept: where the handle keeps the ranks that it goes to. comes(): its row is here.
    template <class Comes, class Stage>
    __device__ void send_token(const Share& s, int token, int32_t* kept, const Comes& comes, const Stage& stage) const {
        if (warp == 0) {
            const unsigned ranks = send_head(s, token);
            if (lane == 0) {
                if (kept != nullptr) *kept = static_cast<int32_t>(ranks);
                shared().ranks = ranks != 0 && comes() ? ranks : 0;
            }
        }
        __syncthreads();
        const unsigned ranks = shared().ranks;
        __syncthreads();
        if (ranks == 0) return;
        for_batches(stage, [&](int begin) {
            staged().push(c, ranks << m.first_rank(), min(kStagedPieces, num_pieces - begin), kQuantized, flag,
                          [&](int to) { return Turn(c, to, call).row(s.source, token) + begin / kLinePieces * kPartsOfLine; });
        });
    }

    // ---- to other nodes ----

    __device__ bool is_there(int64_t expert, int node) const {
        return expert >= 0 && expert < config.num_experts && static_cast<int>(expert) / m.experts_of_node() == node;
    }
    // masks: of this rank, which stay while it sends.
    __device__ bool is_reached(int64_t expert, int node, unsigned masks) const {
        return is_there(expert, node) && ((masks >> m.rank_in(node) | masks >> static_cast<int>(expert) / num_local) & 1) == 0;
    }

    // All threads: use(token, slot) for each token; slot -1 where it does not cross to the node. Returns how many cross.
    template <class Use>
    __device__ int for_slots(int node, const Use& use) const {
        const unsigned masks = this->masks();
        int num_before = 0;
#pragma unroll 1
        for (int first = 0; first < p.num_tokens; first += kThreads) {
            const int token = first + static_cast<int>(threadIdx.x);
            bool goes = false;
            for (int k = 0; k < num_topk && token < p.num_tokens; ++k) goes |= is_reached(expert_at(p, token * num_topk + k), node, masks);
            const unsigned bits = __ballot_sync(kFullWarp, goes);
            if (lane == 0) shared().of_warps[warp] = __popc(bits);
            __syncthreads();
            int slot = num_before + __popc(bits & ((1u << lane) - 1));
            for (int w = 0; w < kWarps; ++w) {
                if (w < warp) slot += shared().of_warps[w];
                num_before += shared().of_warps[w];
            }
            __syncthreads();
            if (token < p.num_tokens) use(token, goes ? slot : -1);
        }
        return num_before;
    }

    // All threads: the message for a node; for one that is lost only the handle.
    __device__ void tell(int node, bool accepted) const {
        LowLatencyRailMessage& message = *m.out(node);
        const RailRouting out(&message, p.num_tokens, num_topk);
        const unsigned masks = this->masks();
        const int num_rows = for_slots(node, [&](int token, int slot) {
            handle.out_slots(node)[token] = out.slots[token] = slot;
            int num_dropped = 0;
            for (int k = 0; k < num_topk; ++k) {
                const int at = token * num_topk + k;
                const int64_t expert = expert_at(p, at);
                const bool reached = is_reached(expert, node, masks);
                num_dropped += is_there(expert, node) && !reached;
                out.topk_idx[at] = reached ? static_cast<int32_t>(expert) : -1;
                out.topk_weights[at] = p.topk_weights != nullptr ? p.topk_weights[at] : 1.0f;
            }
            drop(num_dropped);
        });
        if (m.is_lost(node)) return;
        if (threadIdx.x == 0) {
            LowLatencyWhat what = p.what;
            what.is_refused = !accepted;
            m.enter(node, what.flag(call, p.num_tokens));
            message.num_tokens = p.num_tokens, message.num_rows = num_rows;
            if (!accepted) message.reason.why = refusal();
        }
        m.put_message(node, RailRouting::bytes(p.num_tokens, num_topk));
    }

    // All threads.
    template <DType kType>
    __device__ void send_chunk(int node, int chunk) const {
        const int num_rows = min(kRows, for_slots(node, [&](int token, int slot) {
                                            if (slot / kRows == chunk && slot >= 0) shared().tokens[slot % kRows] = token;
                                        }) - chunk * kRows);
        if (num_rows <= 0) return;
        __syncthreads();
        const int64_t first_byte = chunk * kRows * row_bytes;
        const int end = num_rows * num_pieces;
#pragma unroll 2
        for (int at = threadIdx.x; at - lane < end; at += kThreads) {  // whole warps, and a block of columns is of one row
            const int row = at / num_pieces, nth = at - row * num_pieces;
            const PieceOfRow piece = given<kType>(at < end ? shared().tokens[row] : 0, nth, at < end);
            if (at >= end) continue;
            std::byte* const to = m.outbox(node) + first_byte + row * row_bytes;
            pieces(to)[nth] = piece.value;
            if (kQuantized && nth % kPiecesOfBlock == 0) reinterpret_cast<float*>(to + config.hidden)[nth / kPiecesOfBlock] = piece.scale;
        }
        m.put_rows(node, chunk, first_byte, num_rows * row_bytes);
    }

    // ---- the kernels ----

    // What crosses first, as it has the longer way.
    template <DType kType>
    __device__ void send() const {
        const Share own{c.rank, p};
        const bool accepted = find_places(own);
        if (threadIdx.x == 0 && blockIdx.x == 0) {
            auto* const words = reinterpret_cast<unsigned long long*>(p.handle);
            words[0] = call;
            if (!accepted) words[LowLatencyHandleLayout(config).failed / 8] = call ^ c.failed;
        }
        if (threadIdx.x == 0 && !accepted) shared().reason.why = refusal(), shared().reason.text[0] = '\0';
        LowLatencyWhat told = p.what;
        told.is_refused = !accepted;
        const int num_peers = l.rail.num_nodes - 1, num_chunks = accepted ? (p.num_tokens + kRows - 1) / kRows : 0;
        const int first_chunk = num_peers, first_rank = first_chunk + num_peers * num_chunks;
        const int first_token = first_rank + l.rail.ranks_per_node, end = first_token + p.num_tokens;
#pragma unroll 1
        for (int task = blockIdx.x; task < end; task += gridDim.x) {
            __syncthreads();
            if (task < first_chunk)
                tell(m.node_at(task + 1), accepted);
            else if (task < first_rank)
                send_chunk<kType>(m.node_at((task - first_chunk) % num_peers + 1), (task - first_chunk) / num_peers);
            else if (task < first_token)
                send_counts(own, task - first_rank, flag + p.num_tokens, told.flag(call, 0), accepted,
                            accepted ? nullptr : &shared().reason);
            else
                send_token(
                    own, task - first_token, handle.in_ranks(l.rail.node) + task - first_token, [] { return true; },
                    [&](int begin) { stage_given<kType>(task - first_token, begin); });
        }
        end_send(c, call);
    }

    // A block serves one node, or some where there are fewer blocks: what comes from others does not wait for one that is late.
    __device__ void forward() const {
        const int num_peers = l.rail.num_nodes - 1, blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
#pragma unroll 1
        for (int turn = block % num_peers; turn < num_peers; turn += blocks)
            forward_from(m.node_at(turn + 1), block / num_peers, max(1, (blocks - turn + num_peers - 1) / num_peers));
    }

    // first, step: tasks of this block.
    __device__ void forward_from(int node, int first, int step) const {
        __syncthreads();
        if (threadIdx.x == 0) shared().is_here = !m.is_lost(node) && m.wait_entry(node, c.timeout_ns);
        __syncthreads();
        LowLatencyRailMessage& message = *m.in(node);
        const bool is_here = shared().is_here, is_same = is_here && (message.flag ^ flag) >> kValueBitsOfFlag == 0;
        if (threadIdx.x == 0 && first == 0) handle.num_in(node) = is_same ? message.num_rows : 0;
        if (!is_here) return;
        Share share{m.rank_in(node), {}};
        const RailRouting routing(&message, message.num_tokens, num_topk);
        share.p.num_tokens = is_same ? message.num_tokens : 0;
        share.p.topk_idx = routing.topk_idx;
        share.p.topk_weights = p.what.has_weights ? routing.topk_weights : nullptr;
        find_places(share);
        const unsigned long long told = message.flag - LowLatencyWhat::value_in(message.flag);
#pragma unroll 1
        for (int task = first; task < l.rail.ranks_per_node + share.p.num_tokens; task += step) {
            if (task < l.rail.ranks_per_node)
                send_counts(share, task, message.flag, told, is_same, is_same ? nullptr : &message.reason);
            else
                forward_token(share, task - l.rail.ranks_per_node, routing.slots[task - l.rail.ranks_per_node], node);
        }
    }

    __device__ void forward_token(const Share& share, int token, int slot, int node) const {
        if (threadIdx.x == 0 && slot >= 0) handle.in_tokens(node)[slot] = token;
        send_token(
            share, token, slot < 0 ? nullptr : handle.in_ranks(node) + slot,
            [&] { return slot >= 0 && m.wait_rows(node, slot / kRows, c.timeout_ns); },
            [&](int begin) { stage_arrived(m.inbox(node) + slot * row_bytes, begin); });
    }
};

template <DType kType, bool kQuantized>
__global__ void __launch_bounds__(kThreads, 1) rail_send(const __grid_constant__ Launch l) {
    Kernel<kQuantized>(l, next_call(l.rail.context)).template send<kType>();
}

template <bool kQuantized>
__global__ void __launch_bounds__(kThreads, 1) rail_forward(const __grid_constant__ Launch l) {
    Kernel<kQuantized>(l, *reinterpret_cast<const unsigned long long*>(l.call.handle)).forward();
}

int64_t shared_bytes(const LowLatencyConfig& config) {
    return static_cast<int64_t>(sizeof(Shared)) + 4 * config.num_experts * ((config.num_max_tokens + 31) / 32);
}

template <DType kType>
const char* launch_type(const Launch& l, void* stream) noexcept {
    const int64_t bytes = shared_bytes(l.rail.context.config);
    return l.call.what.fp8 ? try_launch<rail_send<kType, true>>("rail_send", l.num_blocks, bytes, l, stream)
                           : try_launch<rail_send<kType, false>>("rail_send", l.num_blocks, bytes, l, stream);
}

}  // namespace

const char* launch_rail_send(const Launch& l, void* stream) noexcept {
    switch (l.call.what.dtype) {
        case DType::kFloat32: return launch_type<DType::kFloat32>(l, stream);
        case DType::kBFloat16: return launch_type<DType::kBFloat16>(l, stream);
        case DType::kFloat16: return launch_type<DType::kFloat16>(l, stream);
        default: return "rows are quantized on their way; give them as they are";
    }
}

const char* launch_rail_forward(const Launch& l, void* stream) noexcept {
    const int64_t bytes = shared_bytes(l.rail.context.config);
    return l.call.what.fp8 ? try_launch<rail_forward<true>>("rail_forward", l.num_blocks, bytes, l, stream)
                           : try_launch<rail_forward<false>>("rail_forward", l.num_blocks, bytes, l, stream);
}

}  // namespace deepep_moe

// Low-latency dispatch in one kernel, or in two halves. Sending: a block for each destination tells it how many tokens its experts get, the
// others push rows, a token at a time, quantized on the way, each with its place among this rank's tokens of the same expert, and arranged in
// lines in shared memory. Receiving: each warp waits for a part of a row, and for how many rows of its experts come before, and copies it there.
#include <algorithm>

#include "cuda/device/fp8.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/device/low_latency_lines.cuh"
#include "cuda/device/low_latency_places.cuh"

namespace deepep_moe {
namespace {

using Launch = LowLatencyLaunch<LowLatencyDispatchParams>;

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kColumns = 16;                              // of a lane, of a row that is quantized: 16 bytes then
constexpr int kStagedPieces = kThreads / kPartsOfLine * kLinePieces;  // a part for each thread
using Staged = StagedPieces<kStagedPieces>;

// In shared memory.
struct Shared {
    Staged staged[2];  // by turns: one is stored from while the other is written to
    uint32_t marks[];  // Marks
};

template <DType kType, bool kQuantized>
struct Kernel {
    static constexpr int kParts = kQuantized ? 2 : 4;  // of a lane, of a row that is received
    static constexpr int kGivenBytes = kQuantized ? kColumns * static_cast<int>(element_bytes(kType)) : 16;  // of x, that become 16 on the way

    const LowLatencyContext& c;
    const LowLatencyConfig& config;
    const LowLatencyDispatchParams& p;
    const unsigned long long call, flag;  // of this rank in the call, its value 0
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_local;
    const int64_t x_bytes, row_bytes;  // of a row as it is given, and as it is received, without its scales
    const int num_pieces;              // of that

    __device__ Kernel(const Launch& l, unsigned long long call)
        : c(l.context),
          config(c.config),
          p(l.call),
          call(call),
          flag(p.what.flag(call, 0)),
          num_local(config.num_local_experts),
          x_bytes(config.hidden * (16 / Piece<kType>::kCount)),
          row_bytes(kQuantized ? config.hidden : x_bytes),
          num_pieces(static_cast<int>(row_bytes / 16)) {}

    __device__ LowLatencyHandleLayout handle() const { return LowLatencyHandleLayout(config); }
    template <class T>
    __device__ T* in_handle(int64_t offset) const {
        return reinterpret_cast<T*>(p.handle + offset);
    }

    __device__ Marks marks() const { return Marks(shared_memory<Shared>()->marks, p.num_tokens); }

    // ---- sending ----

    // The first blocks send counts, one for each destination, the others rows.
    __device__ void send() const {
        const int block = static_cast<int>(blockIdx.x) - config.num_ranks;
        if (block < 0) {
            enter(blockIdx.x);
            send_counts(blockIdx.x, mark_tokens(c, p, marks()));
        } else if (block < p.num_tokens) {
            send_rows(block, static_cast<int>(gridDim.x) - config.num_ranks);
        }
    }

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
        if (!accepted && !masked) tell_reason(to);
#pragma unroll 1
        for (int expert = threadIdx.x; expert < num_local; expert += kThreads) {
            const int count = marks().count(to * num_local + expert);
            if (!masked)
                store_relaxed(there.counts(c.rank) + expert, told + count);
            else if (count > 0)
                atomicAdd(reinterpret_cast<unsigned long long*>(LowLatencyStatistics(config, p.statistics).num_dropped), count);
        }
    }

    // All threads.
    __device__ void tell_reason(int to) const {
        if (threadIdx.x == 0) {
            auto* reason = reinterpret_cast<LowLatencyReason*>(c.workspaces[to] + c.layout.reasons) + c.rank;
            reason->why = refusal();
            reason->text[0] = '\0';
            __threadfence_system();
        }
        __syncthreads();
    }

    __device__ void send_rows(int first, int step) const {
        Staged* const staged = shared_memory<Shared>()->staged;
        int turn = 0;
#pragma unroll 1
        for (int token = first; token < p.num_tokens; token += step) {
            unsigned ranks = 0;
#pragma unroll 1
            for (int begin = 0; begin < num_pieces; begin += kStagedPieces, turn ^= 1) {
                const Given given(*this, token, begin + threadIdx.x);
                if (token == first && begin == 0) mark_tokens(c, p, marks());  // while columns are on their way here
                ranks = ranks_of(token);
                if (warp == kWarps - 1 && begin == 0) send_head(token, ranks);  // it has no columns
                given.stage(*this, staged[turn]);
                __syncthreads();
                const int first_part = begin / kLinePieces * kPartsOfLine;
                staged[turn].push(c, ranks, min(kStagedPieces, num_pieces - begin), kQuantized, flag + 1,
                                  [&](int to) { return Turn(c, to, call).row(c.rank, token) + first_part; });
            }
        }
    }

    // That a token goes to, of those that are not masked.
    __device__ unsigned ranks_of(int token) const {
        const int rank = rank_of(expert_of(token));
        return __reduce_or_sync(kFullWarp, rank < 0 ? 0u : 1u << rank) & ~*static_cast<volatile unsigned*>(&c.state->masks);
    }

    // Of this lane of top-k, and its rank; -1: none.
    __device__ int expert_of(int token) const {
        const int64_t expert = lane < config.num_topk ? expert_at(p, static_cast<int64_t>(token) * config.num_topk + lane) : -1;
        return expert < config.num_experts ? static_cast<int>(expert) : -1;
    }
    __device__ int rank_of(int expert) const { return expert < 0 ? -1 : expert / num_local; }

    // One warp: what of the token goes where.
    __device__ void send_head(int token, unsigned ranks) const {
        const int expert = expert_of(token), rank = rank_of(expert), num_parts = static_cast<int>(c.layout.head_bytes / 16);
        if (lane == 0) in_handle<unsigned>(handle().rank_masks)[token] = ranks;
        LowLatencyLane out{-1, 0, 1.0f};
        if (lane < config.num_topk && p.topk_weights != nullptr) out.weight = p.topk_weights[static_cast<int64_t>(token) * config.num_topk + lane];
        if (rank >= 0) out.index = static_cast<uint16_t>(marks().before(token, expert));
#pragma unroll 1
        for (int to = 0; to < config.num_ranks; ++to) {
            if (__any_sync(kFullWarp, is_masked(c, to))) continue;
            out.expert = static_cast<int16_t>(rank == to ? expert - to * num_local : -1);
            const uint4 part = head_part(out, flag + (ranks >> to & 1));
            store_part(Turn(c, to, call).head(c.rank, token) + lane, part, lane < num_parts);
        }
    }

    // What becomes 16 bytes of a row on its way.
    struct Given {
        const bool is_any;
        uint4 raw[kGivenBytes / 16] = {};

        __device__ Given(const Kernel& k, int token, int piece) : is_any(threadIdx.x < kStagedPieces && piece < k.num_pieces) {
            if (!is_any) return;
            const uint4* from = pieces(k.p.x + token * k.x_bytes + piece * kGivenBytes);
#pragma unroll
            for (int i = 0; i < kGivenBytes / 16; ++i) raw[i] = from[i];
        }

        __device__ void stage(const Kernel& k, Staged& staged) const {
            uint4 value = raw[0];
            if constexpr (kQuantized) {
                float x[kColumns];
#pragma unroll
                for (int i = 0; i < kGivenBytes / 16; ++i) Piece<kType>::load(raw[i], x + i * Piece<kType>::kCount);
                const Fp8Block block(largest_of<kPiecesOfBlock>(x), k.p.what.is_rounded);
                value = block.store(x).raw;
                if (is_any && threadIdx.x % kPiecesOfBlock == 0) staged.scales[threadIdx.x / kPiecesOfBlock] = block.scale;
            }
            if (is_any) staged.pieces[threadIdx.x] = value;
        }
    };

    // ---- receiving ----

    __device__ void receive() const {
        const Sources sources = meet(c, flag, p.statistics, blockIdx.x == 0 && warp == 0);
        if (blockIdx.x == 0) count(sources);
        const int num_tasks = (parts_of(num_pieces) + 32 * kParts - 1) / (32 * kParts) + 1;  // of a row
#pragma unroll 1
        for (int task = warp * gridDim.x + blockIdx.x;; task += kWarps * gridDim.x) {
            const SourceToken from(task / num_tasks, [&](int source) { return __shfl_sync(kFullWarp, sources.num_tokens, source); }, c.rank, config.num_ranks);
            if (from.source < 0) return;
            receive_part(sources, from.source, from.token, task % num_tasks, num_tasks - 1);
        }
    }

    // One block.
    __device__ void count(const Sources& sources) const {
#pragma unroll 1
        for (int expert = threadIdx.x; expert < num_local; expert += kThreads) {
            const int num_tokens = tokens_before(c, flag, sources.came, config.num_ranks, expert);
            p.num_recv_tokens_per_expert[expert] = num_tokens;
            atomicAdd(reinterpret_cast<unsigned long long*>(LowLatencyStatistics(config, p.statistics).num_tokens_per_expert) + expert, num_tokens);
        }
        if (threadIdx.x < config.num_ranks) in_handle<int32_t>(handle().num_tokens)[threadIdx.x] = sources.num_tokens;
    }

    // kParts parts a lane, or in the last task what goes with the row.
    __device__ void receive_part(const Sources& sources, int source, int token, int task, int last) const {
        const Turn own(c, c.rank, call);
        const int first = task * 32 * kParts + lane, num_parts = task == last ? 0 : parts_of(num_pieces);
        const auto place = [&](int i) -> const uint4* {
            if (i == kParts) return lane < c.layout.head_bytes / 16 ? own.head(source, token) + lane : nullptr;
            return first + 32 * i < num_parts ? own.row(source, token) + first + 32 * i : nullptr;
        };
        Parts<kParts + 1> parts;
        parts.load(place);
        const Bases bases(c, flag, sources.came, source);
        const bool comes = wait_row(parts, place, source);
        LowLatencyLane there = lane_of_head(parts.values[kParts]);
        if (!comes || lane >= config.num_topk) there.expert = -1;
        int base = bases.at(there.expert);
        if (base < 0 && there.expert >= 0) base = tokens_before(c, flag, sources.came, source, there.expert);
        const int place_there = base + there.index;
        const int row = there.expert < 0 ? -1 : there.expert * static_cast<int>(config.capacity()) + place_there;
        const unsigned lanes = __ballot_sync(kFullWarp, row >= 0);
        if (task == last) return receive_rest(source, token, {row, there.weight}, lanes, there.expert, place_there);
#pragma unroll 1
        for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
            uint4* const to = pieces(p.recv_x + __shfl_sync(kFullWarp, row, __ffs(rest) - 1) * row_bytes);
#pragma unroll
            for (int i = 0; i < kParts; ++i)
                if (!ends_line() && piece_of(first + 32 * i) < num_pieces) to[piece_of(first + 32 * i)] = parts.values[i];
        }
    }

    // Until the head is there, the last of `parts`, and the others if it says that the row comes. Does it?
    template <class Place>
    __device__ bool wait_row(Parts<kParts + 1>& parts, const Place& place, int source) const {
        unsigned here = 0;
        bool comes = false, is_loaded = true;
        const auto done = [&](bool masks_too) {
            if (!is_loaded) parts.load(place);
            is_loaded = false;
            here = parts.here(place, flag, ends_line());
            comes = here >> kParts != 0 && LowLatencyWhat::value_in(__shfl_sync(kFullWarp, flag_in(parts.values[kParts]), kLinePieces)) != 0;
            return here == parts.kAll || (here >> kParts != 0 && !comes) || (masks_too && __any_sync(kFullWarp, is_masked(c, source)));
        };
        if (!look_until(c, done) && lane == 0) lose(c, source, GpuPhase::kDispatchRows, call, 0);
        return comes;
    }

    // For the handle, and scales.
    __device__ void receive_rest(int source, int token, const LowLatencyRow& row, unsigned lanes, int expert, int place) const {
        if (lane < config.num_topk) in_handle<LowLatencyRow>(handle().rows)[(source * config.num_max_tokens + token) * config.num_topk + lane] = row;
        if (kQuantized && lanes != 0) receive_scales(source, token, lanes, expert, place);
    }

    // Column-major: the scales of one column of blocks lie together. expert, place: of each lane of top-k.
    __device__ void receive_scales(int source, int token, unsigned lanes, int expert, int place) const {
        const int num_scales = config.hidden / kScaleBlock, num_words = p.what.is_rounded ? (num_scales + 3) / 4 : num_scales;
#pragma unroll 1
        for (int first = 0; first < num_words; first += 32) {
            const int column = first + lane;
            const uint32_t value = p.what.is_rounded ? packed_exponents(source, token, 4 * column, num_scales) : scale_bits(source, token, column, num_scales);
#pragma unroll 1
            for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
                const int from = __ffs(rest) - 1;
                const int64_t at = __shfl_sync(kFullWarp, expert, from) * static_cast<int64_t>(num_words) + column, to = __shfl_sync(kFullWarp, place, from);
                if (column < num_words) static_cast<uint32_t*>(p.recv_x_scales)[at * config.capacity() + to] = value;
            }
        }
    }

    __device__ uint32_t packed_exponents(int source, int token, int first, int num_scales) const {
        uint32_t packed = 0;
#pragma unroll 1
        for (int i = 0; i < 4; ++i) packed |= scale_bits(source, token, first + i, num_scales) >> 23 << 8 * i;
        return packed;
    }

    // All lanes of a warp: the scale of a block each. 0 past the last.
    __device__ uint32_t scale_bits(int source, int token, int block, int num_scales) const {
        const uint4* const row = Turn(c, c.rank, call).row(source, token);
        const int piece = block * kPiecesOfBlock;
        const auto place = [&](int) { return block < num_scales ? row + end_of(piece) : nullptr; };
        Parts<1> part;
        const auto done = [&](bool masks_too) {
            part.load(place);
            return part.here(place, flag, true) != 0 || (masks_too && __any_sync(kFullWarp, is_masked(c, source)));
        };
        if (!look_until(c, done) && lane == 0) lose(c, source, GpuPhase::kDispatchRows, call, 0);
        return __float_as_uint(scale_of(piece, part.values[0]));
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
    return static_cast<int64_t>(sizeof(Shared)) + 4 * c.num_experts * std::max<int64_t>(1, round_up(c.num_max_tokens, 32) / 32);
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
    switch (l.call.what.dtype) {
        case DType::kFloat32: return launch_type<DType::kFloat32>(l, stream);
        case DType::kBFloat16: return launch_type<DType::kBFloat16>(l, stream);
        case DType::kFloat16: return launch_type<DType::kFloat16>(l, stream);
        case DType::kFloat8: throw std::invalid_argument("rows are quantized on their way; give them as they are");
    }
}

}  // namespace deepep_moe

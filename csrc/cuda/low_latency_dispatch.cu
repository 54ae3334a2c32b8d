// A low-latency dispatch is one kernel for the whole call, or two for its halves. It has no plan and needs no host.
//
//   Sending      One block for each destination enters the call there and stores how many tokens its experts get. The other blocks push
//                one token at a time, head and row, in lines of 128 bytes that bring their flags; a row is quantized on the way.
//   Receiving    Every block waits for the counts of all ranks. A warp waits for the head of its token and finds places for its rows.
//                Then half of the block's warps copy each row, waiting for its lines.
//
// One warp computes what all warps of a block need, because the kernel is bound by instruction issue.
#include <algorithm>

#include "cuda/device/launch.cuh"
#include "cuda/device/low_latency_rail.cuh"
#include "cuda/device/low_latency_send.cuh"
#include "cuda/launch.h"

namespace deepep_moe {
namespace {

using Launch = LowLatencyLaunch<LowLatencyDispatchParams>;

constexpr int kThreads = SendShared::kThreads, kWarps = kThreads / 32;

// Holds offsets of a token's rows: bytes in recv_x, words in recv_x_scales.
struct TokenRows {
    int num;
    bool is_here;  // the row is known to have come
    int64_t rows[kMaxTopk], scales[kMaxTopk];
};

// Returns the words of one row's scales, each of which holds one fp32 scale or four rounded exponents.
__device__ __forceinline__ int64_t num_scale_words(const LowLatencyConfig& config, bool is_rounded) {
    const int num_scales = config.hidden / kScaleBlock;
    return is_rounded ? (num_scales + 3) / 4 : num_scales;
}

__device__ __forceinline__ void write_piece(const LowLatencyDispatchParams& p, const TokenRows& rows, int piece, const uint4& part) {
    uint4* const to = pieces(p.recv_x) + piece;
#pragma unroll 1
    for (int n = 0; n < rows.num; ++n) *reinterpret_cast<uint4*>(reinterpret_cast<std::byte*>(to) + rows.rows[n]) = part;
}

// Write one exponent. The last one of a row also zeros the rest of its word.
__device__ __forceinline__ void write_exponent(uint8_t* word, int block, int num_scales, float scale) {
    word[block % 4] = static_cast<uint8_t>(__float_as_uint(scale) >> 23);
    for (int rest = block + 1; block == num_scales - 1 && rest % 4 != 0; ++rest) word[rest % 4] = 0;
}

// Write the scale of one block of columns of the n-th row. Scales are column-major, so those of one column of blocks lie together.
__device__ __forceinline__ void write_scale(const LowLatencyDispatchParams& p, const LowLatencyConfig& config, const TokenRows& rows, int n,
                                            int block, float scale) {
    uint32_t* const first = static_cast<uint32_t*>(p.recv_x_scales) + rows.scales[n];
    if (p.what.is_rounded)
        write_exponent(reinterpret_cast<uint8_t*>(first + block / 4 * config.rows_of_expert()), block, config.hidden / kScaleBlock, scale);
    else
        first[block * config.rows_of_expert()] = __float_as_uint(scale);
}

// Write the scale of the block that begins in the line of `first_piece`, if one does. Each thread of the warp takes some rows.
__device__ __forceinline__ void write_scales(const LowLatencyDispatchParams& p, const LowLatencyConfig& config, const TokenRows& rows,
                                             int lane, int first_piece, const uint4& part) {
    const int num_scales = config.hidden / kScaleBlock, block = (first_piece + kPiecesOfBlock - 1) / kPiecesOfBlock,
              end = lane | kLinePieces;
    const float scale =
        scale_of(block * kPiecesOfBlock, make_uint4(__shfl_sync(kFullWarp, part.x, end), __shfl_sync(kFullWarp, part.y, end), 0, 0));
    if (block * kPiecesOfBlock >= first_piece + kLinePieces || block >= num_scales) return;
#pragma unroll 1
    for (int n = lane % kPartsOfLine; n < rows.num; n += kPartsOfLine) write_scale(p, config, rows, n, block, scale);
}

struct Shared {
    SendShared sending;
    unsigned came;                              // bit mask of the ranks that have entered the call
    int num_tokens[kLowLatencyMaxRanks], most;  // tokens of each rank, and their maximum
    TokenRows tokens[kWarps];
    int more[];  // counts of each rank for the local experts, then Marks
};

// Returns the union of the bits of all threads of a block.
__device__ __noinline__ unsigned union_of_threads(unsigned bits) {
    __shared__ unsigned all;
    if (threadIdx.x == 0) all = 0;
    __syncthreads();
    if (bits != 0) atomicOr(&all, bits);
    __syncthreads();
    return all;
}

// Tells a receiver where the words of the ranks lie: in one node, or also for ranks of other nodes.
struct OneNode {
    static constexpr bool kIsOne = true;
    using Words = WorkspaceWords;
    const LowLatencyContext& c;
    const unsigned long long call;
    __device__ Words words() const { return {c, call}; }
};
struct SeveralNodes {
    static constexpr bool kIsOne = false;
    using Words = RailWords;
    const RailCall rail;
    __device__ Words words() const { return {rail}; }
};

template <DType kType, bool kQuantized, class Nodes>
struct Receiver {
    static constexpr int kParts = 2;   // parts of a row that a thread handles at once
    static constexpr int kGroups = 2;  // groups of warps

    const LowLatencyContext& c;
    const LowLatencyDispatchParams& p;
    const Nodes nodes;
    const LowLatencyConfig& config;
    const unsigned long long call, flag;  // flag: this rank's in the call, with value 0
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_local;
    const int64_t row_bytes;  // bytes of a row, without its scales
    const int num_pieces;     // pieces of a row, without its scales
    const int num_senders;    // blocks that send before they receive
    const int num_relays;     // blocks that do not receive

    __device__ Receiver(const LowLatencyContext& c, const LowLatencyDispatchParams& p, const Nodes& nodes, unsigned long long call,
                        int num_senders, int num_relays)
        : c(c),
          p(p),
          nodes(nodes),
          config(c.config),
          call(call),
          flag(p.what.flag(call, 0)),
          num_local(config.num_local_experts),
          row_bytes(kQuantized ? config.hidden : config.hidden * (16 / Piece<kType>::kCount)),
          num_pieces(static_cast<int>(row_bytes / 16)),
          num_senders(num_senders),
          num_relays(num_relays) {}

    __device__ LowLatencyHandleLayout handle() const { return LowLatencyHandleLayout(config); }

    __device__ static Shared& shared() { return *shared_memory<Shared>(); }
    __device__ bool is_outside(int source) const {
        if constexpr (Nodes::kIsOne)
            return false;
        else
            return nodes.rail.is_outside(source);
    }

    __device__ void fail() const { fail_handle(c, p.handle, call); }

    // Receive the block's tokens, kWarps at a time. Each warp finds the rows of one token; then groups of warps copy one token each, so
    // that the parts of the next one are in flight. The tokens' numbers depend on the largest count of a rank; until all counts have come,
    // this rank's own count is the guess.
    __device__ void receive() const {
        const int begin = first_token(), step = num_blocks();
        int most = max(1, p.num_tokens), end = static_cast<int>(config.capacity());
#pragma unroll 1
        for (int first = begin; first < end; first += kWarps * step) {
            const int nth = first + warp * step;
            bool is_loaded = nth < min(end, config.num_ranks * most) && !is_outside(token_at(nth, most).source);
            Parts<1> head;
            if (is_loaded) head.load(PartsOfHead(*this, token_at(nth, most)));
            if (first == begin) {
                wait_sources(begin == 0);
                end = config.num_ranks * shared().most;
                is_loaded &= shared().most == most;
                most = max(1, shared().most);
            }
            const SourceToken from = token_at(nth, most);
            if (lane == 0) shared().tokens[warp].num = 0;
            if (nth < end) find_rows(from, head, is_loaded, shared().tokens[warp]);
            __syncthreads();
            const int num_groups = first + step < end ? kGroups : 1;
#pragma unroll 1
            for (int n = warp % num_groups; n < kWarps && first + n * step < end; n += num_groups)
                if (shared().tokens[n].num != 0) copy(token_at(first + n * step, most), shared().tokens[n], num_groups);
            __syncthreads();
        }
    }

    __device__ int num_blocks() const { return static_cast<int>(gridDim.x) - num_relays; }

    // Blocks that do not send take the first tokens.
    __device__ int first_token() const {
        const int block = static_cast<int>(blockIdx.x) - num_relays - num_senders;
        return block < 0 ? block + num_blocks() : block;
    }

    // Returns the n-th token, as if each rank had `most`, in the order in which rows come: this rank's first, then those of the rank whose
    // pushes arrive here first.
    __device__ SourceToken token_at(int nth, int most) const {
        const int turn = nth / most, source = c.rank - turn;
        return {source < 0 ? source + config.num_ranks : source, nth - turn * most};
    }

    // Wait until all ranks and their counts have come. The block that `tells` publishes the counts and keeps statistics.
    __device__ void wait_sources(bool tells) const {
        unsigned lacking;  // ranks that have not entered the call, or whose counts have not come, as far as this thread knows
        if (warp == 0) {
            const Sources sources = meet(c, nodes.words(), flag, p.statistics, tells);
            store_sources(sources);
            lacking = (kFullWarp >> (32 - config.num_ranks)) & ~sources.came;
        } else {
            lacking = wait_counts(c, flag, shared().more, threadIdx.x - 32, kThreads - 32);
        }
        if (__syncthreads_or(static_cast<int>(lacking)) != 0) {
            lacking = union_of_threads(lacking);
            if (threadIdx.x == 0 && (lacking & ~masks_of(c)) != 0 && gave_up(c)) fail();
        }
        if (c.masks_stalled) agree_across_blocks(lacking);
        if (tells) publish_counts();
    }

    __device__ void store_sources(const Sources& sources) const {
        const unsigned most = __reduce_max_sync(kFullWarp, static_cast<unsigned>(sources.num_tokens));
        if (lane == 0) shared().came = sources.came, shared().most = static_cast<int>(most);
        if (lane < config.num_ranks) shared().num_tokens[lane] = sources.num_tokens;
    }

    // Make all blocks agree on the ranks that have come: if a rank's counts are unknown, its rows would overwrite those of another rank.
    __device__ void agree_across_blocks(unsigned lacking) const {
        if (warp == 0)
            store_sources(
                agreed(c, nodes.words(), flag, {shared().came & ~lacking, lane < config.num_ranks ? shared().num_tokens[lane] : 0}));
        __syncthreads();
        read_counts_again(c, flag, shared().more, shared().came & lacking);
        __syncthreads();
    }

    __device__ void publish_counts() const {
        if (threadIdx.x < config.num_ranks) in_handle<int32_t>(p, handle().num_tokens)[threadIdx.x] = shared().num_tokens[threadIdx.x];
#pragma unroll 1
        for (int expert = threadIdx.x; expert < num_local; expert += kThreads) {
            const int num_tokens = tokens_before(c, shared().more, shared().came, config.num_ranks, expert);
            p.num_recv_tokens_per_expert[expert] = num_tokens;
            atomicAdd(reinterpret_cast<unsigned long long*>(LowLatencyStatistics(config, p.statistics).num_tokens_per_expert) + expert,
                      num_tokens);
        }
    }

    // Find places for a token's rows, for the block and the handle. The head may be loaded already, perhaps not whole. One warp calls it.
    __device__ void find_rows(const SourceToken& from, Parts<1>& head, bool is_loaded, TokenRows& out) const {
        if (from.token >= shared().num_tokens[from.source]) return;
        LowLatencyLane there{-1, 0, 0.0f};
        bool is_here = false;
        if constexpr (!Nodes::kIsOne) {
            if (is_outside(from.source)) there = lane_from_outside(from, is_here);
        }
        if (!is_outside(from.source) && wait(head, PartsOfHead(*this, from), from.source, is_loaded)) there = lane_of_head(head.values[0]);
        if (lane >= config.num_topk) there.expert = -1;
        int row = -1;
        if (there.expert >= 0)
            row = there.expert * static_cast<int>(config.rows_of_expert()) +
                  tokens_before(c, shared().more, shared().came, from.source, there.expert) + there.index;
        LowLatencyRow* const rows =
            in_handle<LowLatencyRow>(p, handle().rows) + (from.source * config.num_max_tokens + from.token) * config.num_topk;
        if (lane < config.num_topk) rows[lane] = {row, there.weight};
        const unsigned lanes = __ballot_sync(kFullWarp, row >= 0);
        const int nth = __popc(lanes & ((1u << lane) - 1));
        if (row >= 0) {
            out.rows[nth] = row * row_bytes;
            out.scales[nth] = row + there.expert * (num_scale_words(config, p.what.is_rounded) - 1) * config.rows_of_expert();
        }
        if (lane == 0) out.num = __popc(lanes), out.is_here = is_here;
    }

    // Returns this thread's top-k entry of a token from another node, and sets is_here if the row has landed. One warp calls it.
    __device__ LowLatencyLane lane_from_outside(const SourceToken& from, bool& is_here) const {
        const RailCall& rail = nodes.rail;
        LowLatencyLane there{-1, 0, 0.0f};
        if (lane < config.num_topk) there = rail.lanes(from.source, from.token)[lane];
        is_here = load_acquire(Turn(c, c.rank, call).landed(from.source, from.token)) >> kWhatBits == call;
        const int expert = there.expert - rail.r.index * num_local;
        there.expert = static_cast<int16_t>(there.expert >= 0 && expert >= 0 && expert < num_local ? expert : -1);
        return there;
    }

    // Wait until all parts have come; is_loaded says that they were loaded once. Returns false if this rank gives up. One warp calls it.
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

    // These functors give the address of each part that a warp loads, of a head and of a row from `first` on.
    struct PartsOfHead {
        const uint4* const head;
        const bool is_any;
        __device__ PartsOfHead(const Receiver& k, const SourceToken& from)
            : head(Turn(k.c, k.c.rank, k.call).head(from.source, from.token) + k.lane), is_any(k.lane < k.c.layout.head_bytes / 16) {}
        __device__ const uint4* operator()(int) const { return is_any ? head : nullptr; }
    };
    struct PartsOfRow {
        const uint4* const row;
        const int first, step, num;
        __device__ PartsOfRow(const Receiver& k, const SourceToken& from, int first, int step)
            : row(Turn(k.c, k.c.rank, k.call).row(from.source, from.token)),
              first(first + k.lane),
              step(step),
              num(parts_of(k.num_pieces)) {}
        __device__ int nth(int i) const { return first + i * step; }
        __device__ const uint4* operator()(int i) const { return nth(i) < num ? row + nth(i) : nullptr; }
    };

    // Copy a token's row to its places, with zeros for parts that do not come. All warps of a group call it.
    __device__ void copy(const SourceToken& from, const TokenRows& rows, int num_groups) const {
        if constexpr (!Nodes::kIsOne) {
            if (is_outside(from.source)) return copy_from_outside(from, rows, num_groups);
        }
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

    // Copy a row that the network has written, which has no lines.
    __device__ void copy_from_outside(const SourceToken& from, const TokenRows& rows, int num_groups) const {
        const RailCall& rail = nodes.rail;
        const int step = kThreads / num_groups, begin = warp / num_groups * 32 + lane;
        const bool is_here = rows.is_here || wait_row(from);
        const std::byte* const row = rail.row(from.source, from.token, rail_row_bytes(config, row_bytes, kQuantized));
#pragma unroll 1
        for (int first = begin; first < num_pieces; first += kParts * step) {
            uint4 piece[kParts] = {};
#pragma unroll
            for (int i = 0; i < kParts; ++i)
                if (is_here && first + i * step < num_pieces) piece[i] = __ldcg(pieces(row) + first + i * step);
#pragma unroll
            for (int i = 0; i < kParts; ++i)
                if (first + i * step < num_pieces) write_piece(p, rows, first + i * step, piece[i]);
        }
        const int num_scales = kQuantized ? config.hidden / kScaleBlock : 0;
#pragma unroll 1
        for (int block = begin; block < num_scales; block += step) {
            const float scale = is_here ? __ldcg(reinterpret_cast<const float*>(row + row_bytes) + block) : 0.0f;
            for (int n = 0; n < rows.num; ++n) write_scale(p, config, rows, n, block, scale);
        }
    }

    // Wait until a row from another node has landed. One warp calls it.
    __device__ bool wait_row(const SourceToken& from) const {
        bool is_here = false;
        if (lane == 0) {
            const unsigned long long* const landed = Turn(c, c.rank, call).landed(from.source, from.token);
            const unsigned long long word =
                wait_word_of(c, landed, call, from.source, GpuPhase::kRailRows, c.timeout_ns) == 0 ? 0 : load_acquire(landed);
            is_here = word >> kWhatBits == call;
            if (word >> kWhatBits > call) report_what(c, flag, word, from.source);
            if (!is_here && gave_up(c)) fail();
        }
        __syncwarp();
        return __shfl_sync(kFullWarp, is_here, 0);
    }
};

template <DType kType, bool kQuantized>
__global__ void __launch_bounds__(kThreads, 2) low_latency_dispatch(const __grid_constant__ Launch l) {
    let_next_kernel_start();
    wait_for_kernel_before();
    const LowLatencyContext& c = l.context;
    const unsigned long long call = l.sends ? next_call(c) : *reinterpret_cast<const unsigned long long*>(l.call.handle);
    const int num_senders = l.sends ? min(static_cast<int>(gridDim.x), c.config.num_ranks + l.call.num_tokens) : 0;
    Shared& shared = *shared_memory<Shared>();
    if (l.sends) Sender<kType, kQuantized, NobodyOutside>(c, l.call, {c}, shared.sending, shared.more + c.config.num_experts, call).send();
    if (l.receives) Receiver<kType, kQuantized, OneNode>(c, l.call, {c, call}, call, num_senders, 0).receive();
    if (l.sends) end_send(c, call);
}

// The first blocks pass on to this node's ranks what the rail has brought. They receive too if there are no other blocks.
template <DType kType, bool kQuantized>
__global__ void __launch_bounds__(kThreads, 2) low_latency_receive(const __grid_constant__ LowLatencyRailDispatch l) {
    let_next_kernel_start();
    wait_for_kernel_before();
    const RailCall rail(l.rail, *reinterpret_cast<const unsigned long long*>(l.call.handle));
    const int block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
    const int num_relays = max(1, min((Relay::num_tasks(l.rail) + kThreads - 1) / kThreads, blocks / 2));
    if (block < num_relays) Relay{rail, l.call}.run(block * kThreads + threadIdx.x, num_relays * kThreads);
    if (block < num_relays && blocks > num_relays) return;
    Receiver<kType, kQuantized, SeveralNodes>(l.rail.context, l.call, {rail}, rail.call, 0, blocks > num_relays ? num_relays : 0).receive();
}

// Passes on what the rail has brought for a dispatch whose hook comes later.
__global__ void __launch_bounds__(kThreads, 1) low_latency_relay(const __grid_constant__ LowLatencyRailDispatch l) {
    wait_for_kernel_before();
    const RailCall rail(l.rail, *reinterpret_cast<const unsigned long long*>(l.call.handle));
    Relay{rail, l.call}.run(blockIdx.x * kThreads + threadIdx.x, gridDim.x * kThreads);
}

constexpr int kRelayBlocks = 4;

}  // namespace

int64_t low_latency_shared_bytes(const LowLatencyConfig& c) {
    return static_cast<int64_t>(sizeof(Shared)) + 4 * c.num_experts * (1 + round_up(c.num_max_tokens / c.lanes, 32) / 32);
}

// The result is the same for all types of rows, because __launch_bounds__ limits the registers.
int low_latency_blocks_per_multiprocessor(const LowLatencyConfig& c) {
    const int blocks = blocks_per_multiprocessor<low_latency_dispatch<DType::kBFloat16, false>>(kThreads, low_latency_shared_bytes(c));
    return std::min({2, blocks, low_latency_combine_blocks_per_multiprocessor()});
}

void launch_low_latency(Launch l, void* stream) {
    l.call.what.operation = LowLatencyOperation::kDispatch;
    const int senders = l.context.config.num_ranks + std::max(1, l.call.num_tokens);
    if (!l.receives) l.num_blocks = std::min(l.num_blocks, senders);
    const int64_t shared_bytes = low_latency_shared_bytes(l.context.config);
    with_types(l.call.what, [&](auto dtype, auto fp8) {
        launch<low_latency_dispatch<dtype.value, fp8.value>>("low_latency_dispatch", l.num_blocks, kThreads, shared_bytes, l, stream,
                                                             starts_early());
    });
}

void launch_low_latency_receive(LowLatencyRailDispatch l, void* stream) {
    l.call.what.operation = LowLatencyOperation::kDispatch;
    const int64_t shared_bytes = low_latency_shared_bytes(l.rail.context.config);
    with_types(l.call.what, [&](auto dtype, auto fp8) {
        launch<low_latency_receive<dtype.value, fp8.value>>("low_latency_receive", l.num_blocks, kThreads, shared_bytes, l, stream,
                                                            starts_early());
    });
}

void launch_low_latency_relay(LowLatencyRailDispatch l, void* stream) {
    l.call.what.operation = LowLatencyOperation::kDispatch;
    launch<low_latency_relay>("low_latency_relay", std::min(l.num_blocks, kRelayBlocks), kThreads, 0, l, stream);
}

}  // namespace deepep_moe

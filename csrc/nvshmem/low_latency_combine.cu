// Low-latency combine over nodes: two kernels behind the one of a node that sends (csrc/cuda/low_latency_combine.cu), which has pushed sums
// of this rank's experts to the rank of its node with the index of the token's.
//
//   sum       meets the ranks of its node, enters the call in the other nodes, adds up what the ranks of this node have for tokens of
//   those,
//             and puts the sums, a few rows at a time
//   finish    with the hook: adds the sums of all nodes, in their order
#include <nvshmem.h>
#include <nvshmemx.h>

#include "cuda/device/low_latency_lines.cuh"
#include "nvshmem/low_latency.h"
#include "nvshmem/low_latency_rail.cuh"

namespace deepep_moe {
namespace {

using Launch = LowLatencyRailCombine;

constexpr int kThreads = tuning::kLowLatencyThreads;
constexpr int kRows = kLowLatencyRailRows;
constexpr int kRanksAtOnce = 4;  // whose parts are on their way to the thread that adds them

struct Shared {
    unsigned came;  // ranks of this node, or nodes, that combine along the same dispatch
    bool gave_up;
};

template <DType kType>
struct Kernel {
    using Values = Piece<kType>;
    static constexpr int kColumns = Values::kCount;

    const Launch& l;
    const RailCallMemory m;
    const LowLatencyContext& c;
    const LowLatencyConfig& config;
    const LowLatencyCombineParams& p;
    const RailHandle handle;
    const unsigned long long call, flag;  // of this rank in the call, its value 0
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int num_pieces, num_parts;  // of a row
    const int64_t row_bytes;

    __device__ Kernel(const Launch& l, unsigned long long call)
        : l(l),
          m(l.rail, call),
          c(l.rail.context),
          config(c.config),
          p(l.call),
          handle(l.rail, l.call.handle),
          call(call),
          flag(p.what.flag(call, 0)),
          num_pieces(config.hidden / kColumns),
          num_parts(parts_of(num_pieces)),
          row_bytes(16 * static_cast<int64_t>(num_pieces)) {}

    __device__ static Shared& shared() { return *shared_memory<Shared>(); }

    // The call whose handle it is.
    __device__ unsigned long long dispatch() const { return *reinterpret_cast<const unsigned long long*>(p.handle); }
    __device__ bool has_failed() const {
        const auto failed = LowLatencyHandleLayout(config).failed;
        return *reinterpret_cast<const unsigned long long*>(p.handle + failed) == (dispatch() ^ c.failed);
    }
    __device__ unsigned long long own_word() const { return flag + LowLatencyWhat::value_in(dispatch()); }
    __device__ unsigned long long refusing_word() const {
        LowLatencyWhat what = p.what;
        what.is_refused = true;
        return what.flag(call, 0);
    }

    // Does the word of a rank say that it combines along the same dispatch? Else it is reported.
    __device__ bool check_word(unsigned long long word, int source) const {
        if (!check_what(c, flag, word, source)) return false;
        const int own = LowLatencyWhat::value_in(dispatch()), theirs = LowLatencyWhat::value_in(word);
        if (own != theirs) report(c, kMismatch, source, GpuPhase::kCombineRows, static_cast<long long>(dispatch()), theirs);
        return own == theirs;
    }

    __device__ void count_wait(int source, unsigned long long since) const {
        if (blockIdx.x == 0)
            atomicAdd(reinterpret_cast<unsigned long long*>(LowLatencyStatistics(config, p.statistics).wait_ns) + source, now_ns() - since);
    }

    __device__ GpuFailure failed_handle() const {
        return {kFailedHandle, c.rank, static_cast<int>(GpuPhase::kEntry), static_cast<long long>(dispatch()), 0};
    }

    // ---- the ranks of this node ----

    // Lane r of the first warp of the first block tells rank r of this node.
    __device__ void enter_node(bool failed) const {
        const int to = m.first_rank() + lane;
        if (lane == 0) *reinterpret_cast<unsigned long long*>(p.call) = call;
        if (failed && lane == 0) report(c, kFailedHandle, c.rank, GpuPhase::kEntry, static_cast<long long>(dispatch()), 0);
        if (lane >= l.rail.ranks_per_node || is_masked(c, to)) return;
        if (failed) {
            LowLatencyReason* const reason = reason_at(c, to);
            reason->why = failed_handle();
            reason->text[0] = '\0';
            __threadfence_system();
        }
        store_relaxed(Turn(c, to, call).entered(c.rank), failed ? refusing_word() : own_word());
    }

    // One warp: which ranks of this node have come, in bits of their index.
    __device__ unsigned meet_node() const {
        const int source = m.first_rank() + lane;
        bool came = false;
        if (lane < l.rail.ranks_per_node) {
            const unsigned long long since = now_ns(), *const entered = Turn(c, c.rank, call).entered(source);
            unsigned long long word = is_masked(c, source) ? 0 : wait_word_of(c, entered, call, source, GpuPhase::kEntry);
            count_wait(source, since);
            came = word != 0 && check_word(word, source);
            if (c.masks_stalled) came = agree(c, call, source, came);
        }
        return __ballot_sync(kFullWarp, came);
    }

    // All threads: this rank's entry in another node. One that has failed, or has heard of a failure, says so.
    __device__ void enter_rail(int node, bool failed) const {
        if (m.is_lost(node)) return;
        if (threadIdx.x == 0) {
            const bool refuses = failed || gave_up(c);
            LowLatencyRailMessage& message = m.enter(node, refuses ? refusing_word() : own_word());
            if (refuses) message.reason.why = failed ? failed_handle() : own_failure(c);
        }
        m.put_message(node, sizeof(LowLatencyRailMessage));
    }

    // All threads: the sums of a chunk of the rows that have come from a node.
    __device__ void send_chunk(int node, int chunk, unsigned came) const {
        const int first = chunk * kRows, num_rows = min(kRows, handle.num_in(node) - first);
        std::byte* const to = m.outbox(node) + first * row_bytes;
#pragma unroll 1
        for (int row = 0; row < num_rows; ++row) {
            const int token = handle.in_tokens(node)[first + row];
            const unsigned ranks = handle.in_ranks(node)[first + row] & came;
#pragma unroll 1
            for (int part = warp * 32; part < num_parts; part += kThreads) {
                float sum[kColumns] = {};
                add_ranks(sum, node, token, ranks, part + lane);
                const int piece = piece_of(part + lane);
                if (!ends_line() && piece < num_pieces) pieces(to + row * row_bytes)[piece] = Values::store(sum);
            }
        }
        // Of a rank that has given up meanwhile, sums may lack a rank's rows: they do not go, and the other node's rank gives up too.
        __syncthreads();
        if (threadIdx.x == 0) shared().gave_up = gave_up(c);
        __syncthreads();
        if (!shared().gave_up) m.put_rows(node, chunk, first * row_bytes, num_rows * row_bytes);
    }

    // One warp: part `i` of the sums that ranks of this node have of a token of this rail in `node`, in their order. They lie where a rank
    // of that node with their index would have put its own.
    __device__ void add_ranks(float (&sum)[kColumns], int node, int token, unsigned ranks, int i) const {
#pragma unroll 1
        for (unsigned rest = ranks; rest != 0;) {
            int rank[kRanksAtOnce];
#pragma unroll
            for (int n = 0; n < kRanksAtOnce; ++n, rest &= rest - 1) rank[n] = __ffs(rest) - 1;
            const Turn own(c, c.rank, call);
            const auto place = [&](int n) {
                return rank[n] >= 0 && i < num_parts ? own.row(node * l.rail.ranks_per_node + rank[n], token) + i : nullptr;
            };
            Parts<kRanksAtOnce> parts;
            unsigned here = 0;
            const auto is_lost = [&](int n) { return rank[n] >= 0 && is_masked(c, m.first_rank() + rank[n]); };
            const auto done = [&](bool masks_too) {
                parts.load(place);
                here = parts.here(place, flag);
                unsigned given_up = 0;
#pragma unroll
                for (int n = 0; n < kRanksAtOnce; ++n) given_up |= static_cast<unsigned>(masks_too && is_lost(n)) << n;
                return (here | __reduce_or_sync(kFullWarp, given_up)) == parts.kAll;
            };
            const bool is_done = look_until(c, done);
#pragma unroll
            for (int n = 0; n < kRanksAtOnce; ++n) {
                if (rank[n] >= 0 && (here >> n & 1) != 0) add(sum, parts.values[n]);
                if (!is_done && (here >> n & 1) == 0 && lane == 0)
                    mask_or_report(c, m.first_rank() + rank[n], GpuPhase::kCombineRows, call, 0);
            }
        }
    }

    __device__ static void add(float (&sum)[kColumns], const uint4& piece) {
        float x[kColumns];
        Values::load(piece, x);
#pragma unroll
        for (int v = 0; v < kColumns; ++v) sum[v] = __fadd_rn(sum[v], x[v]);
    }

    __device__ void send() const {
        const bool failed = has_failed();
        if (blockIdx.x == 0 && warp == 0) enter_node(failed);
        __syncthreads();
        if (warp == 0) {
            const unsigned came = failed ? 0 : meet_node();
            if (lane == 0) shared().came = came;
        }
        __syncthreads();
        const unsigned came = shared().came;
        const int num_peers = l.rail.num_nodes - 1;
        int nth = blockIdx.x;  // tasks of this block: entries first, then chunks of one node after the other
#pragma unroll 1
        for (; nth < num_peers; nth += gridDim.x) enter_rail(m.node_at(nth + 1), failed);
        nth -= num_peers;
#pragma unroll 1
        for (int turn = 1; turn <= num_peers; ++turn) {
            const int node = m.node_at(turn), num_chunks = failed || m.is_lost(node) ? 0 : (handle.num_in(node) + kRows - 1) / kRows;
#pragma unroll 1
            for (; nth < num_chunks; nth += gridDim.x) send_chunk(node, nth, came);
            nth -= num_chunks;
        }
    }

    // ---- other nodes ----

    // One warp: which nodes have come, in bits.
    __device__ unsigned meet_rail() const {
        bool came = lane == l.rail.node;
        if (lane < l.rail.num_nodes && !came && !m.is_lost(lane)) {
            const int source = m.rank_in(lane);
            const unsigned long long since = now_ns();
            came = m.wait_entry(lane, behind_node_ns(c));
            count_wait(source, since);
            if (came) came = check_message(lane, source);
            if (c.masks_stalled) came = agree(c, call, source, came);
        }
        return __ballot_sync(kFullWarp, came);
    }

    __device__ bool check_message(int node, int source) const {
        const LowLatencyRailMessage& message = *m.in(node);
        const bool is_refused = LowLatencyWhat::unpacked(LowLatencyWhat::packed_in(message.flag)).is_refused;
        if (is_refused) {
            *reinterpret_cast<LowLatencyReason*>(c.workspaces[c.rank] + c.layout.reason_of(source)) = message.reason;
            __threadfence_system();
        }
        return check_word(message.flag, source);
    }

    // One warp: part `i` of a token's sums of all nodes.
    __device__ void finish_part(int token, unsigned came, int i) const {
        const int piece = piece_of(i);
        float total[kColumns] = {};
#pragma unroll 1
        for (int node = 0; node < l.rail.num_nodes; ++node) {
            if (node == l.rail.node) {
                float sum[kColumns] = {};
                add_ranks(sum, node, token, handle.in_ranks(node)[token], i);
#pragma unroll
                for (int v = 0; v < kColumns; ++v) total[v] = __fadd_rn(total[v], sum[v]);
            } else if ((came >> node & 1) != 0) {
                const int slot = handle.out_slots(node)[token];
                if (slot < 0 || !warp_wait_rows(node, slot / kRows)) continue;
                if (!ends_line() && piece < num_pieces) add(total, pieces(m.inbox(node) + slot * row_bytes)[piece]);
            }
        }
        if (!ends_line() && piece < num_pieces) pieces(p.combined_x + token * row_bytes)[piece] = Values::store(total);
    }

    __device__ bool warp_wait_rows(int node, int chunk) const {
        const bool is_here = lane == 0 && m.wait_rows(node, chunk, behind_node_ns(c));
        __syncwarp();
        return __ballot_sync(kFullWarp, is_here) != 0;  // and what lane 0 has seen arrive, all lanes may read
    }

    __device__ void finish() const {
        if (warp == 0) {
            const unsigned came = meet_rail();
            if (lane == 0) shared().came = came;
        }
        __syncthreads();
        const unsigned came = shared().came;
        const int num_tasks = (num_parts + kThreads - 1) / kThreads;
#pragma unroll 1
        for (int task = blockIdx.x; task < p.num_tokens * num_tasks; task += gridDim.x) {
            const int part = task % num_tasks * kThreads + warp * 32;
            if (part < num_parts) finish_part(task / num_tasks, came, part + lane);
        }
    }
};

// The kernel of the node that sends has counted the call.
template <DType kType>
__global__ void __launch_bounds__(kThreads, 1) rail_sum(const __grid_constant__ Launch l) {
    Kernel<kType>(l, next_call(l.rail.context) - 1).send();
}

template <DType kType>
__global__ void __launch_bounds__(kThreads, 1) rail_finish(const __grid_constant__ Launch l) {
    Kernel<kType>(l, *reinterpret_cast<const unsigned long long*>(l.call.call)).finish();
}

template <DType kType>
const char* launch_type(bool sums, const Launch& l, void* stream) noexcept {
    return sums ? try_launch<rail_sum<kType>>("rail_sum", l.num_blocks, sizeof(Shared), l, stream)
                : try_launch<rail_finish<kType>>("rail_finish", l.num_blocks, sizeof(Shared), l, stream);
}

const char* launch_half(bool sums, const Launch& l, void* stream) noexcept {
    switch (l.call.what.dtype) {
        case DType::kFloat32: return launch_type<DType::kFloat32>(sums, l, stream);
        case DType::kBFloat16: return launch_type<DType::kBFloat16>(sums, l, stream);
        case DType::kFloat16: return launch_type<DType::kFloat16>(sums, l, stream);
        default: return "combine takes float32, bfloat16 or float16";
    }
}

}  // namespace

const char* launch_rail_sum(const Launch& l, void* stream) noexcept { return launch_half(true, l, stream); }
const char* launch_rail_finish(const Launch& l, void* stream) noexcept { return launch_half(false, l, stream); }

}  // namespace deepep_moe

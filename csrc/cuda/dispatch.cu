// Dispatches on one NVLink host. This second kernel of the call may start while the plan runs.
//
//   lane blocks      Send the peers the target row and the weight of each (token, expert). Wait for the plan's counts.
//   send blocks      Push whole rows into slots in the peers' memory, with one flag a chunk. Wait for `placed` and `met`.
//   receive blocks   Copy the rows of each chunk to their final places while later chunks fly. Wait for the plan, then for the chunk's
//                    flag and its lanes.
//
// Each warp of a send block has a ring of rows in shared memory. The last warp only sets the flags of chunks whose rows have landed.
// Rows that stay on the rank go straight from x. A call in two halves launches the first two roles, then the third.
#include "cuda/device/launch.cuh"
#include "cuda/device/push.cuh"
#include "cuda/launch.h"

#include <algorithm>
#include <type_traits>

namespace deepep_moe {
namespace {

using tuning::kMaxRingWarps;
constexpr int kMaxWarps = kMaxRingWarps + 1;  // warps of a block; one warp sets the flags for the others
constexpr int kTaskRows = tuning::kReceiveTaskRows;
static_assert(kChunkSlots % kTaskRows == 0);

// A receiver writes rows to recv_x unchanged (Unscaled), or with `scale_row` (Scaled).
struct Unscaled {};
template <DType kType>
struct Scaled {
    static constexpr DType kDType = kType;
};

// Find the row and tail of a token of this rank, or of one that came to it from another node.
__device__ __forceinline__ void find_row(const GpuDispatchParams& p, const GpuSlotLayout& slot, int node, int token, const std::byte*& row,
                                         const std::byte*& tail) {
    const GpuWorkspaceConfig& config = p.context.config;
    const int index = config.num_nodes == 1 ? token : token - node * config.node_tokens();
    if (node != config.node) {
        row = p.rail.of_node(p.rail.inbox, config, node, slot.bytes) + index * slot.bytes;
        tail = row + slot.row_bytes;
        return;
    }
    const int64_t x_row = p.x_row(index);
    row = p.x + x_row * p.row_bytes;
    tail = p.x_scales + x_row * p.scale_bytes;
}

// Wait until the rail has brought the token of every thread that `uses` one; then all threads, and their bulk copies, may read the rows.
// Returns false if this rank gives up.
__device__ inline bool wait_for_rail(const GpuDispatchParams& p, int node, bool uses, int token) {
    const GpuContext& c = p.context;
    if (node == c.config.node) return true;
    const unsigned long long* ready = p.rail.ready + token / kRailSlots;
    const bool ok = !uses || wait_flag(c, ready, c.state->sequence, rail_peer(node), GpuPhase::kRailRows);
    const bool all_ok = __all_sync(kFullWarp, ok);
    fence_bulk_copies();
    return all_ok;
}

template <class Ring, class Scaling>
struct Receiver {
    const GpuDispatchParams& p;
    const GpuContext& c;
    const GpuWorkspaceConfig& config;
    const GpuSlotLayout& slot;
    const Workspace workspace;
    const unsigned long long sequence;
    const int64_t num_rows;
    const int warp, lane;
    Ring ring;
    unsigned lanes_here = 0;  // bit mask of the sources whose lanes this warp has seen arrive

    __device__ Receiver(const GpuDispatchParams& p, const GpuSlotLayout& slot, int64_t num_rows)
        : p(p),
          c(p.context),
          config(c.config),
          slot(slot),
          workspace(c, c.rank),
          sequence(c.state->sequence),
          num_rows(num_rows),
          warp(threadIdx.x / 32),
          lane(threadIdx.x % 32),
          ring(p.ring, slot) {}

    // Take the rows that stay on this rank first, as they are there already, then those of the sources in the order in which they send.
    __device__ void receive() {
        WarpTasks tasks(&c.state->next_receive);
        const auto drain = [&](const RingRow& row) { place(row); };
        const auto source_at = [&](int turn) { return Source::at_turn(config, config.node, c.rank, turn, -1); };
        const auto num_tasks = [&](const Source& from) { return divide_up(count_from(p.recv_counts, from.number(config)), kTaskRows); };
        while (true) {
            const SourceTask task(tasks.take(), 0, config.num_sources(), source_at, num_tasks);
            if (!task.is_there) break;
            const int begin = task.number * kTaskRows, count = count_from(p.recv_counts, task.source.number(config));
            if (!take(task.source, begin, min(begin + kTaskRows, count), drain)) {
                if (!p.cached && lane == 0) atomicOr(reinterpret_cast<unsigned*>(p.recv_counts), static_cast<unsigned>(kFailed));
                break;
            }
        }
        ring.flush(drain);
        ring.template settle<0>();
    }

    // Receive rows [begin, end) of a source, which lie in one chunk. Returns false if this rank gives up.
    template <class Drain>
    __device__ bool take(const Source& from, int begin, int end, const Drain& drain) {
        const int source = from.rank, first_slot = from.first_slot(config);
        const bool is_local = source == c.rank;
        if (p.has_lanes && !(lanes_here >> source & 1)) {
            if (!warp_wait_flag(c, workspace.lanes_ready(source), sequence, source, GpuPhase::kLanes)) return false;
            lanes_here |= 1u << source;
        }
        const int first = first_from(c, p.routing, p.recv_counts, from) - first_slot;  // first + slot numbers the token
        begin += first_slot, end += first_slot;
        GpuLane lanes[kTaskRows];  // these loads fly while the warp waits for the rows
#pragma unroll
        for (int i = 0; i < kTaskRows; ++i) lanes[i] = load_lane(source, min(begin + i, end - 1), first);
        if (!is_local && !warp_wait_flag(c, workspace.arrived(source, begin), sequence, source, GpuPhase::kDispatchRows)) return false;
        const int sent_token = is_local && begin + lane < end ? p.routing.send_token[source * config.num_max_tokens + begin + lane] : 0;
        if (is_local && !wait_for_rail(p, from.node, begin + lane < end, sent_token)) return false;
#pragma unroll 1
        for (int index = begin; index < end; ++index) {
            GpuLane what = lanes[0];
#pragma unroll
            for (int i = 1; i < kTaskRows; ++i)
                if (index == begin + i) what = lanes[i];
            const int target = take_lane(what, first + index);
            const std::byte *row = workspace.inbox(source) + index * slot.bytes, *tail = row + slot.row_bytes;
            if (is_local) find_row(p, slot, from.node, __shfl_sync(kFullWarp, sent_token, index - begin), row, tail);
            ring.add(row, tail, target, drain);
        }
        return true;
    }

    // Load this thread's top-k entry of a token. A cached handle of the expert layout has the target already.
    __device__ GpuLane load_lane(int source, int index, int first) const {
        GpuLane what{-1, 0.0f};
        if (lane >= config.num_topk) return what;
        if (p.has_lanes) what = workspace.lanes(source, index)[lane];
        if (p.cached && p.is_expert_layout) what.target = p.recv_row_idx[static_cast<int64_t>(first + index) * config.num_topk + lane];
        return what;
    }

    // Write the index and weight of a received token; return the row of recv_x for this thread's top-k entry, or -1.
    __device__ int take_lane(GpuLane what, int recv_token) const {
        const int64_t entry = static_cast<int64_t>(recv_token) * config.num_topk + lane;
        if (!p.is_expert_layout) {
            if (recv_token >= num_rows) return -1;
            if (lane < config.num_topk) write_lane(entry, what);
            return lane == 0 ? recv_token : -1;
        }
        if (what.target >= num_rows) what.target = config.is_by_lane ? kLeftOut : -1;
        if (!p.cached && lane < config.num_topk) p.recv_row_idx[entry] = what.target;
        if (what.target >= 0 && p.recv_topk_weights != nullptr) p.recv_topk_weights[what.target] = what.weight;
        return what.target;
    }

    __device__ void write_lane(int64_t entry, GpuLane what) const {
        if (p.recv_topk_idx != nullptr && p.recv_topk_idx_is_int64) static_cast<int64_t*>(p.recv_topk_idx)[entry] = what.target;
        if (p.recv_topk_idx != nullptr && !p.recv_topk_idx_is_int64) static_cast<int32_t*>(p.recv_topk_idx)[entry] = what.target;
        if (p.recv_topk_weights != nullptr) p.recv_topk_weights[entry] = what.target >= 0 ? what.weight : 0.0f;
    }

    __device__ void place(const RingRow& row) const {
#pragma unroll 1
        for (unsigned rest = __ballot_sync(kFullWarp, row.note >= 0); rest != 0; rest &= rest - 1) {
            const int64_t to = __shfl_sync(kFullWarp, row.note, __ffs(rest) - 1);
            if constexpr (!std::is_same_v<Scaling, Unscaled>) {
                scale_row<Scaling::kDType>(p.scaling, row.row, p.recv_x + to * p.row_bytes, to, p.row_bytes);
                continue;
            }
            ring.store(p.recv_x + to * p.row_bytes, row);
            if (p.scale_bytes > 0) ring.store_tail(p.recv_x_scales + to * p.scale_bytes, row);
        }
    }

    // Zero the rows that nobody sends: the padding of the experts' groups, and the rows behind them. This is warp `me` of `num_warps`.
    __device__ void zero_rest(int me, int num_warps) {
        int end = 0, padding = 0;  // rows of the groups before, and how many of them are padding
#pragma unroll 1
        for (int first = 0; p.is_expert_layout && first < config.num_experts / config.num_ranks; first += 32) {
            const bool inside = first + lane < config.num_experts / config.num_ranks;
            const int count = inside ? p.num_recv_tokens_per_expert[first + lane] : 0;
            const int padded = divide_up(count, p.expert_alignment) * p.expert_alignment;
            const int last = end + prefix_sum(padded), last_padding = padding + prefix_sum(padded - count);
            const int begin_padding = last_padding - (padded - count), all_padding = __shfl_sync(kFullWarp, last_padding, 31);
#pragma unroll 1
            for (int n = padding + (me + num_warps - padding % num_warps) % num_warps; n < all_padding; n += num_warps) {
                const int owner = __ffs(__ballot_sync(kFullWarp, begin_padding <= n && n < last_padding)) - 1;
                zero_row(__shfl_sync(kFullWarp, last - last_padding, owner) + n);
            }
            end = __shfl_sync(kFullWarp, last, 31), padding = all_padding;
        }
#pragma unroll 1
        for (int source = 0; !p.is_expert_layout && source < config.num_sources(); ++source) end += count_from(p.recv_counts, source);
#pragma unroll 1
        for (int64_t row = end + me; row < num_rows; row += num_warps) zero_row(row);
        ring.end_zeros();
    }

    __device__ void zero_row(int64_t row) {
        if (row >= num_rows) return;
        if constexpr (!std::is_same_v<Scaling, Unscaled>)
            return scale_row<Scaling::kDType>(p.scaling, nullptr, p.recv_x + row * p.row_bytes, row, p.row_bytes);
        ring.store_zeros(p.recv_x + row * p.row_bytes);
        const int num_weights = p.recv_topk_weights == nullptr ? 0 : p.is_expert_layout ? 1 : config.num_topk;
#pragma unroll 1
        for (int64_t i = lane; i < p.scale_bytes / 4; i += 32) reinterpret_cast<float*>(p.recv_x_scales + row * p.scale_bytes)[i] = 0.0f;
        if (lane < num_weights) p.recv_topk_weights[row * num_weights + lane] = 0.0f;
    }
};

template <class Ring>
__device__ void send(const GpuDispatchParams& p, const GpuSlotLayout& slot) {
    const GpuWorkspaceConfig& config = p.context.config;
    const auto find = [&](const Source& to, int index) { return p.routing.send_token[to.rank * config.num_max_tokens + index]; };
    const auto ready = [&](const Source& to, int first, int end, int token) {
        return wait_for_rail(p, to.node, first + static_cast<int>(threadIdx.x % 32) < end, token);
    };
    const auto rows = [&](const Source& to, int, int token, const std::byte*& row, const std::byte*& tail) {
        find_row(p, slot, to.node, token, row, tail);
    };
    push<Ring>(p.context, p.ring, slot, kChunkSlots, 1, p.routing.send_counts, p.to_outbox, config.node, ready, find, rows);
}

// Send every peer, ahead of the rows, the targets and weights of its tokens.
struct LaneSender {
    const GpuDispatchParams& p;
    const GpuContext& c;
    const GpuWorkspaceConfig& config;
    const GpuRouting& r;

    __device__ explicit LaneSender(const GpuDispatchParams& p) : p(p), c(p.context), config(c.config), r(p.routing) {}

    __device__ void send(int block) const {
        const int num_entries = r.num_tokens * config.num_topk, step = p.num_lane_blocks * blockDim.x;
#pragma unroll 1
        for (int entry = block * blockDim.x + threadIdx.x; entry < num_entries; entry += step) send_lane(entry);
        fence_system();
        if (!is_last_block(&c.state->num_told, p.num_lane_blocks)) return;
        if (static_cast<int>(threadIdx.x) < config.num_ranks)
            store_release(Workspace(c, threadIdx.x).lanes_ready(c.rank), c.state->sequence);
    }

    __device__ void send_lane(int entry) const {
        const int token = entry / config.num_topk, k = entry - token * config.num_topk, num_local = config.num_experts / config.num_ranks;
        const int expert = static_cast<int>(r.expert(token, k));
        GpuLane lane{-1, 0.0f};
        if (expert >= 0) {
            lane.target = expert % num_local;
            if (p.is_expert_layout && !p.cached)
                lane.target = r.expert_row_base[r.node_of(config, token) * config.num_experts + expert] +
                              tokens_before(c, r, token, expert) + r.index_in_warp[entry];
            if (p.topk_weights.values != nullptr) lane.weight = p.topk_weights.of(token, k);
        }
#pragma unroll 1
        for (int rank = 0; rank < config.num_ranks; ++rank) {
            const int slot = r.send_slot[token * config.num_ranks + rank];
            if (slot >= 0) Workspace(c, rank).lanes(c.rank, slot)[k] = expert >= 0 && expert / num_local == rank ? lane : GpuLane{-1, 0.0f};
        }
    }
};

template <class Ring, class Scaling>
__device__ void play_role(const GpuDispatchParams& p) {
    const GpuSlotLayout slot(p.row_bytes, p.scale_bytes);
    int block = static_cast<int>(blockIdx.x) - p.num_lane_blocks;
    const bool sends = block >= 0 && block < p.num_send_blocks;
    if (!wait_for_plan(p.context, !sends)) return;
    if (block < 0) return LaneSender(p).send(block + p.num_lane_blocks);
    if (sends) return send<Ring>(p, slot);
    block -= p.num_send_blocks;
    const int64_t num_rows = p.is_guess ? p.context.state->num_rows : p.num_rows;
    if (static_cast<int>(threadIdx.x) >= 32 * p.ring.warps || num_rows > p.num_rows) return;
    Receiver<Ring, Scaling> receiver(p, slot, num_rows);
    receiver.zero_rest(block * p.ring.warps + receiver.warp, p.num_receive_blocks * p.ring.warps);
    receiver.receive();
}

template <class Ring, class Scaling>
__global__ void __launch_bounds__(32 * kMaxWarps, 1) dispatch(const __grid_constant__ GpuDispatchParams p) {
    play_role<Ring, Scaling>(p);
    wait_for_kernel_before();
}

template <class Scaling>
void launch_for(const GpuDispatchParams& p, int blocks, void* stream, bool early) {
    const int threads = 32 * (p.ring.warps + 1);
    if (p.ring.stages == 0) return launch<dispatch<PlainRing, Scaling>>("dispatch", blocks, threads, 0, p, stream);
    const int64_t shared_bytes = RingMemory::bytes(p.ring, GpuSlotLayout(p.row_bytes, p.scale_bytes));
    launch<dispatch<BulkRing, Scaling>>("dispatch", blocks, threads, shared_bytes, p, stream, early);
}

}  // namespace

GpuRing fit_ring(GpuRing wished, int64_t row_bytes, int64_t tail_bytes, int64_t shared_bytes) {
    const GpuSlotLayout slot(row_bytes, tail_bytes);
    GpuRing ring{std::min(wished.warps, kMaxRingWarps), wished.stages};
    while (ring.stages > 3 && RingMemory::bytes(ring, slot) > tuning::kRingBytes) --ring.stages;
    while (ring.warps > 1 && RingMemory::bytes(ring, slot) > tuning::kRingBytes) --ring.warps;
    if (ring.stages == 0 || RingMemory::bytes(ring, slot) > shared_bytes) return {kMaxRingWarps, 0};
    return ring;
}

void launch_dispatch(const GpuDispatchParams& p, void* stream, bool early) {
    const int blocks = p.num_lane_blocks + p.num_send_blocks + p.num_receive_blocks;
    if (p.scaling.weights == nullptr) return launch_for<Unscaled>(p, blocks, stream, early);
    with_dtype(p.scaling.dtype, "fp8 rows have no gradient",
               [&](auto dtype) { launch_for<Scaled<dtype.value>>(p, blocks, stream, early); });
}

}  // namespace deepep_moe

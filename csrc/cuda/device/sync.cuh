// The kernels of a call share this: waits of warps and blocks, tasks, addresses in a workspace.
#pragma once

#include "cuda/params.h"
#include "cuda/device/wait.cuh"

namespace deepep_moe {

// ---- for all threads of a warp ----

__device__ __forceinline__ const std::byte* shuffle(const std::byte* pointer, int lane) {
    return reinterpret_cast<const std::byte*>(__shfl_sync(kFullWarp, reinterpret_cast<uintptr_t>(pointer), lane));
}

// Returns the sum of the values of all threads of the warp up to this one.
__device__ __forceinline__ int prefix_sum(int value) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(kFullWarp, value, step);
        if (lane >= step) value += other;
    }
    return value;
}

// ---- for kernels with a warp for each row or token, which wait for no other block ----

constexpr int kRowThreads = 256;  // threads of a block

// Returns the number of this thread's warp.
__device__ __forceinline__ int64_t warp_of_grid() { return (static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x) / 32; }

// Returns how many blocks have these warps.
inline int blocks_of_warps(int64_t num_warps) { return static_cast<int>(divide_up(num_warps, int64_t{kRowThreads / 32})); }

// ---- waits, tasks, addresses ----

// Wait for a flag with a whole warp. Thread 0 waits; then all threads and their bulk copies may read what it has seen arrive.
__device__ inline bool warp_wait_flag(const GpuContext& c, const unsigned long long* flag, unsigned long long expected, int peer,
                                      GpuPhase phase) {
    int ok = 1;
    if (threadIdx.x % 32 == 0) {
        ok = wait_flag(c, flag, expected, peer, phase);
        fence_bulk_copies();
    }
    __syncwarp();
    return __shfl_sync(kFullWarp, ok, 0) != 0;
}

// A warp takes tasks from a counter. The next one is fetched while the warp works on the current one.
class WarpTasks {
public:
    __device__ explicit WarpTasks(int* next) : next_(next) { ask(); }
    __device__ int take() {
        const int task = __shfl_sync(kFullWarp, asked_, 0);
        ask();
        return task;
    }

private:
    __device__ void ask() {
        if (threadIdx.x % 32 == 0) asked_ = atomicAdd(next_, 1);
    }
    int* const next_;
    int asked_ = 0;
};

// Wait until the plan of this call, which may still run, has placed this rank's tokens and met the peers, and with `for_counts` until it
// knows what this rank receives. Returns false if this rank gives up. All threads of a block call it before anything else.
__device__ inline bool wait_for_plan(const GpuContext& c, bool for_counts) {
    __shared__ int ok;
    if (threadIdx.x == 0) {
        const GpuState& state = *c.state;
        ok = wait_flag(c, &state.placed, c.plan, c.rank, GpuPhase::kPlan) && wait_flag(c, &state.met, c.plan, c.rank, GpuPhase::kPlan) &&
             (!for_counts || wait_flag(c, &state.counted, c.plan, c.rank, GpuPhase::kPlan)) && !gave_up(c);
    }
    __syncthreads();
    return ok != 0;
}

// Names a rank of this node with its share of one node's tokens. Rows come from it or go to it.
struct Source {
    int node, rank;

    // Returns the source whose turn it is, counted from `first_node` and `rank` on. With step -1 ranks go backwards.
    static __device__ Source at_turn(const GpuWorkspaceConfig& config, int first_node, int rank, int turn, int step = 1) {
        if (config.num_nodes == 1) return {0, (rank + (step > 0 ? turn : config.num_ranks - turn)) % config.num_ranks};
        const int nodes = turn / config.num_ranks, ranks = turn - nodes * config.num_ranks;
        return {(first_node + nodes) % config.num_nodes, (rank + (step > 0 ? ranks : config.num_ranks - ranks)) % config.num_ranks};
    }
    __device__ int number(const GpuWorkspaceConfig& config) const { return node * config.num_ranks + rank; }
    __device__ int first_slot(const GpuWorkspaceConfig& config) const { return config.num_nodes == 1 ? 0 : node * config.node_tokens(); }
};

// Finds the nth of all tasks, which is task `number` of `source`. The sources source_at(first_turn), source_at(first_turn + 1), ... have
// num_tasks(source) tasks each.
struct SourceTask {
    Source source{};
    int number = 0;
    bool is_there = false;  // false: nth is past the last task
    template <class SourceAt, class NumTasks>
    __device__ SourceTask(int nth, int first_turn, int num_turns, const SourceAt& source_at, const NumTasks& num_tasks) : number(nth) {
#pragma unroll 1
        for (int turn = first_turn; turn < num_turns; ++turn) {
            const Source candidate = source_at(turn);
            const int count = num_tasks(candidate);
            if (number < count) {
                source = candidate, is_there = true;
                return;
            }
            number -= count;
        }
    }
};

// Returns whether this is the last of `num_blocks` blocks to call it. The writes of the others are then visible. All threads must call it.
__device__ inline bool is_last_block(int* counter, int num_blocks) {
    __shared__ int last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(counter, 1) == num_blocks - 1;
        __threadfence();
    }
    __syncthreads();
    return last != 0;
}

// Returns the number of tokens received from `source`.
__device__ __forceinline__ int count_from(const int32_t* recv_counts, int source) { return recv_counts[source] & ~kFailed; }

// Returns the number of the first token received from `source`.
__device__ __forceinline__ int first_from(const int32_t* recv_counts, int source) {
    int first = 0;
#pragma unroll 1
    for (int before = 0; before < source; ++before) first += count_from(recv_counts, before);
    return first;
}

// Returns that number too; with several nodes the plan has added up the counts already.
__device__ __forceinline__ int first_from(const GpuContext& c, const GpuRouting& r, const int32_t* recv_counts, const Source& source) {
    return c.config.num_nodes == 1 ? first_from(recv_counts, source.rank) : r.recv_first[source.number(c.config)];
}

// Returns how many of this rank's tokens for `column` (expert or rank) the plan's warps before that of `token` have, in its node.
__device__ __forceinline__ int tokens_before(const GpuContext& c, const GpuRouting& r, int token, int column) {
    const int columns = c.layout.columns;
    int warp = token / r.tokens_per_warp;
    if (c.config.num_nodes > 1) {
        const int node = token / c.config.node_tokens();
        warp = node * r.node_segments * kPlanWarps + (token - node * c.config.node_tokens()) / r.tokens_per_warp;
    }
    return __ldcg(&r.segment_counts[warp / kPlanWarps * columns + column]) + __ldcg(&r.warp_counts[warp * columns + column]);
}

struct Workspace {
    __device__ Workspace(const GpuContext& c, int owner) : layout(c.layout), base(c.workspaces[owner]), config(c.config), owner(owner) {}
    __device__ unsigned long long* entered(unsigned long long sequence, int source) const {
        return flag(layout.entered_of(static_cast<int>(sequence & 1), source), 0);
    }
    __device__ unsigned long long* bound(unsigned long long sequence, int source) const {
        return flag(layout.bound_of(static_cast<int>(sequence & 1), source), 0);
    }
    __device__ unsigned long long* lanes_ready(int source) const { return flag(layout.lanes_ready, source); }
    // Returns the flag of the chunk of slot `index`.
    __device__ unsigned long long* arrived(int source, int index) const {
        return flag(layout.arrived, (source * layout.num_chunks + index / kChunkSlots) * kArrivedStride);
    }
    __device__ GpuStamp* stamp(unsigned long long sequence, int source) const {
        return reinterpret_cast<GpuStamp*>(base + layout.stamp_of(sequence, source));
    }
    // Returns the [columns] words that a source writes.
    __device__ unsigned long long* counts(unsigned long long sequence, int source) const {
        return flag(layout.counts, ((sequence & 1) * layout.num_sources + source) * layout.columns);
    }
    // Returns the [num_topk] entries of the token in a slot.
    __device__ GpuLane* lanes(int source, int64_t slot) const {
        return reinterpret_cast<GpuLane*>(base + layout.lanes) + (source * config.num_max_tokens + slot) * config.num_topk;
    }
    // Return the slots that come from a peer of the owner, and those that go to one.
    __device__ std::byte* inbox(int peer) const { return base + layout.inbox_of(owner, peer); }
    __device__ std::byte* outbox(int peer) const { return base + layout.outbox_of(owner, peer); }

    const GpuWorkspaceLayout& layout;
    std::byte* const base;
    const GpuWorkspaceConfig& config;
    const int owner;

private:
    __device__ unsigned long long* flag(int64_t offset, int64_t index) const {
        return reinterpret_cast<unsigned long long*>(base + offset) + index;
    }
};

}  // namespace deepep_moe

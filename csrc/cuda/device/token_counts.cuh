// The counting half of a plan counts how many of a block's tokens go to each expert and rank, and finds each token's place among them. It
// uses ballots and prefix sums instead of atomics, so the order is the same in every run.
#pragma once

#include "cuda/device/sync.cuh"

namespace deepep_moe {

using tuning::kPlanThreads;

// Rare paths are not inlined, because a kernel that runs once for microseconds must fetch every line of its code.
__device__ __noinline__ inline void refuse_index(const GpuContext& c, int entry, long long expert) {
    report(c, kIndexOutOfRange, entry % c.config.num_topk, GpuPhase::kNone, entry / c.config.num_topk, expert);
}

__device__ __noinline__ inline void refuse_duplicate(const GpuContext& c, int entry, int expert) {
    report(c, kDuplicateExpert, entry % c.config.num_topk, GpuPhase::kNone, entry / c.config.num_topk, expert);
}

struct TokenCounts {
    static constexpr int kLoads = tuning::kPlanLoads;

    const GpuPlanParams& p;
    const GpuContext& c;
    const GpuWorkspaceConfig& config;
    const GpuRouting& r;
    const int columns, num_local, warp, lane;
    const unsigned long long sequence;
    const int node;                  // the node whose tokens this block counts
    const int warp_begin, warp_end;  // this warp's tokens
    int32_t* const warp_counts;      // shared memory [kPlanWarps, columns]: tokens of each warp
    int32_t* const all_counts;       // [num_sources, columns] counts of each source; later, in the same memory
    int32_t* const experts;          // shared memory [32, num_topk]: experts of 32 tokens of this warp, -1 = none
    const Workspace workspace;
    int* const num_rows;  // shared memory [kMaxGpuRanks]: rows that each rank receives

    __device__ TokenCounts(const GpuPlanParams& p, int32_t* shared, int* num_rows)
        : p(p),
          c(p.context),
          config(c.config),
          r(p.routing),
          columns(c.layout.columns),
          num_local(config.num_experts / config.num_ranks),
          warp(threadIdx.x / 32),
          lane(threadIdx.x % 32),
          sequence(c.state->sequence + 1),
          node(static_cast<int>(blockIdx.x) / r.node_segments),
          warp_begin(first_of(node) + ((static_cast<int>(blockIdx.x) - node * r.node_segments) * kPlanWarps + warp) * r.tokens_per_warp),
          warp_end(min(min(warp_begin + r.tokens_per_warp, first_of(node + 1)), r.num_tokens)),
          warp_counts(shared),
          all_counts(shared),
          experts(shared + kPlanWarps * columns + warp * 32 * config.num_topk),
          workspace(c, c.rank),
          num_rows(num_rows) {}

    // Returns the number of a node's first token, which is that of its first slot too.
    __device__ int first_of(int node) const { return node * config.node_tokens(); }

    __device__ void count() const {
#pragma unroll 1
        for (int i = threadIdx.x; i < kPlanWarps * columns; i += kPlanThreads) warp_counts[i] = 0;
#pragma unroll 1
        for (int i = blockIdx.x * kPlanThreads + threadIdx.x; p.cached && i < config.num_ranks * workspace.layout.num_reduced;
             i += gridDim.x * kPlanThreads)
            r.reduced[i] = 0;  // only combines use it, and they are cached
        __syncthreads();
        int32_t* counts = warp_counts + warp * columns;
#pragma unroll 1
        for (int first = warp_begin; first < warp_end; first += 32) {
            const int num_tokens = min(warp_end - first, 32);
            load_experts(first, num_tokens);
            count_ranks(first, num_tokens, counts + config.num_experts);
            const int num_entries = num_tokens * config.num_topk, step = 32 / config.num_topk * config.num_topk;  // whole tokens
#pragma unroll 1
            for (int begin = 0; !p.cached && begin < num_entries; begin += step)
                count_expert(first * config.num_topk, lane < step && begin + lane < num_entries ? begin + lane : -1, counts);
            __syncwarp();
        }
        __syncthreads();
#pragma unroll 1
        for (int column = threadIdx.x; column < columns; column += kPlanThreads) {
            int total = 0;
#pragma unroll
            for (int w = 0; w < kPlanWarps; ++w) {
                r.warp_counts[(static_cast<int>(blockIdx.x) * kPlanWarps + w) * columns + column] = total;
                total += warp_counts[w * columns + column];
            }
            r.segment_counts[static_cast<int>(blockIdx.x) * columns + column] = total;
        }
    }

    // Load the experts of up to 32 tokens, and refuse indices out of range.
    __device__ void load_experts(int first, int num_tokens) const {
        const int num_entries = num_tokens * config.num_topk, before = first * config.num_topk;
#pragma unroll 1
        for (int begin = lane; begin < num_entries; begin += 32 * kLoads) {
            int64_t wide[kLoads];
#pragma unroll
            for (int i = 0; i < kLoads; ++i) {
                const int entry = begin + 32 * i, token = entry / config.num_topk;
                wide[i] = entry < num_entries ? r.expert(first + token, entry - token * config.num_topk) : -1;
            }
#pragma unroll
            for (int i = 0; i < kLoads; ++i) {
                const int entry = begin + 32 * i;
                if (entry >= num_entries) continue;
                const bool inside = wide[i] >= -1 && wide[i] < config.num_experts;
                if (!inside) refuse_index(c, before + entry, wide[i]);
                experts[entry] = inside ? static_cast<int>(wide[i]) : -1;
                if (r.narrow_topk_idx != nullptr) r.narrow_topk_idx[before + entry] = experts[entry];
            }
        }
        __syncwarp();
    }

    // Give each token its slots on the way to its ranks, and count these. Each thread takes one token.
    __device__ void count_ranks(int first, int num_tokens, int32_t* counts) const {
        unsigned ranks = 0;
#pragma unroll 1
        for (int k = 0; k < config.num_topk && lane < num_tokens; ++k) {
            const int expert = experts[lane * config.num_topk + k];
            if (expert >= 0) ranks |= 1u << (expert / num_local);
        }
#pragma unroll 1
        for (int rank = 0; rank < config.num_ranks; ++rank) {
            const unsigned goes = __ballot_sync(kFullWarp, ranks >> rank & 1);
            const int before = counts[rank] + __popc(goes & ((1u << lane) - 1));
            if (lane < num_tokens) r.send_slot[(first + lane) * config.num_ranks + rank] = (ranks >> rank & 1) ? before : -1;
            __syncwarp();
            if (lane == 0) counts[rank] += __popc(goes);
            __syncwarp();
        }
    }

    // Number the entries with the same expert in thread order, and refuse duplicates. Each thread takes one entry of topk_idx, or -1.
    __device__ void count_expert(int first_entry, int entry, int32_t* counts) const {
        const int expert = entry >= 0 ? experts[entry] : -1;
        const unsigned same = __match_any_sync(kFullWarp, expert), earlier = same & ((1u << lane) - 1);
        const int before = __popc(earlier);
        if (expert >= 0) r.index_in_warp[first_entry + entry] = counts[expert] + before;
        if (expert >= 0 && earlier >> (lane - lane % config.num_topk) != 0) refuse_duplicate(c, first_entry + entry, expert);
        __syncwarp();
        if (expert >= 0 && before == 0) counts[expert] += __popc(same);
        __syncwarp();
    }
};

}  // namespace deepep_moe

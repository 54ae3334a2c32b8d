// Where this rank's tokens go: counts, exchanged with all ranks, and from them the slot and the row of every token. Positions come
// from ballots and prefix sums, so they are the same in every run.
#include <stdexcept>
#include <string>

#include "cuda/device/sync.cuh"
#include "cuda/launch.h"

namespace deepep_moe {
namespace {

constexpr int kExchangeThreads = 1024;

__device__ int64_t num_segments(const GpuRouting& r) { return divide_up(r.num_tokens, kTokensPerSegment); }

__device__ int expert_at(const GpuRouting& r, int64_t entry) {
    return r.is_int64 ? static_cast<int>(static_cast<const int64_t*>(r.topk_idx)[entry]) : static_cast<const int32_t*>(r.topk_idx)[entry];
}

// Refuses indices out of range and duplicates; returns the ranks of the token, a bit each.
__device__ unsigned check_token(const GpuPlanParams& p, int64_t token) {
    const int num_topk = p.context.config.num_topk, num_experts = p.context.config.num_experts;
    unsigned ranks = 0;
    for (int k = 0; k < num_topk; ++k) {
        const int64_t entry = token * num_topk + k;
        const long long wide = p.routing.is_int64 ? static_cast<const int64_t*>(p.routing.topk_idx)[entry] : expert_at(p.routing, entry);
        if (wide < -1 || wide >= num_experts) report(p.context, kIndexOutOfRange, k, GpuPhase::kNone, token, wide);
        if (wide < 0 || wide >= num_experts) continue;
        for (int other = 0; other < k; ++other)
            if (expert_at(p.routing, token * num_topk + other) == wide) report(p.context, kDuplicateExpert, k, GpuPhase::kNone, token, wide);
        ranks |= 1u << (wide / (num_experts / p.context.config.num_ranks));
    }
    return ranks;
}

// One warp counts one segment. Shared memory: int32 [columns].
__global__ void count_segments(const __grid_constant__ GpuPlanParams p) {
    extern __shared__ int32_t running[];
    const GpuWorkspaceConfig& config = p.context.config;
    const GpuRouting& r = p.routing;
    const int lane = threadIdx.x, columns = config.num_experts + config.num_ranks;
    const int64_t begin = static_cast<int64_t>(blockIdx.x) * kTokensPerSegment, end = min(begin + kTokensPerSegment, r.num_tokens);
    for (int i = lane; i < columns; i += 32) running[i] = 0;
    __syncwarp();

    for (int64_t first = begin; first < end; first += 32) {  // ranks, a token a lane
        const int64_t token = first + lane;
        const unsigned ranks = token < end ? check_token(p, token) : 0;
        for (int rank = 0; rank < config.num_ranks; ++rank) {
            const unsigned goes = __ballot_sync(kFullWarp, ranks >> rank & 1);
            const int before = running[config.num_experts + rank] + __popc(goes & ((1u << lane) - 1));
            if (token < end) r.send_slot[token * config.num_ranks + rank] = (ranks >> rank & 1) ? before : -1;
            __syncwarp();
            if (lane == 0) running[config.num_experts + rank] += __popc(goes);
            __syncwarp();
        }
    }
    for (int64_t first = begin * config.num_topk; first < end * config.num_topk; first += 32) {  // experts, a top-k lane a lane
        const int64_t entry = first + lane;
        const bool inside = entry < end * config.num_topk;
        int expert = inside ? expert_at(r, entry) : -1;
        if (expert >= config.num_experts) expert = -1;
        if (inside && r.narrow_topk_idx != nullptr) r.narrow_topk_idx[entry] = expert;
        const unsigned same = __match_any_sync(kFullWarp, expert);
        const int rank_in_warp = __popc(same & ((1u << lane) - 1));
        if (inside && expert >= 0) r.index_in_segment[entry] = running[expert] + rank_in_warp;
        __syncwarp();
        if (expert >= 0 && rank_in_warp == 0) running[expert] += __popc(same);
        __syncwarp();
    }
    for (int i = lane; i < columns; i += 32) r.segment_counts[blockIdx.x * static_cast<int64_t>(columns) + i] = running[i];
}

// Turns segment_counts into the sums of the segments before, and sends the totals to every rank.
__device__ void sum_and_send(const GpuPlanParams& p) {
    const GpuWorkspaceConfig& config = p.context.config;
    const int columns = config.num_experts + config.num_ranks;
    const int64_t segments = num_segments(p.routing);
    for (int column = threadIdx.x; column < columns; column += blockDim.x) {
        int total = 0;
#pragma unroll 8
        for (int64_t segment = 0; segment < segments; ++segment) {
            int32_t& cell = p.routing.segment_counts[segment * columns + column];
            const int count = cell;
            cell = total;
            total += count;
        }
        if (column >= config.num_experts) p.routing.send_counts[column - config.num_experts] = total;
        for (int rank = 0; rank < config.num_ranks && !p.cached; ++rank)
            Workspace(p.context, rank).counts(p.context.sequence, p.context.rank)[column] = total;
    }
}

// Rows of every expert's group, on the expert's rank, in `base` [num_experts]: the first row of this rank's tokens. A warp a rank.
__device__ int lay_out_rank(const GpuPlanParams& p, int rank, int32_t* base) {
    const GpuWorkspaceConfig& config = p.context.config;
    const Workspace own(p.context, p.context.rank);
    const int num_local = config.num_experts / config.num_ranks, lane = threadIdx.x % 32;
    int rows = 0;
    for (int first = 0; first < num_local; first += 32) {
        const int expert = rank * num_local + first + lane;
        int before_me = 0, total = 0;
        for (int source = 0; source < config.num_ranks && first + lane < num_local; ++source) {
            const int count = own.counts(p.context.sequence, source)[expert];
            if (source < p.context.rank) before_me += count;
            total += count;
        }
        if (rank == p.context.rank && first + lane < num_local) p.num_recv_tokens_per_expert[first + lane] = total;
        const int padded = static_cast<int>(divide_up(total, p.expert_alignment)) * p.expert_alignment;
        int inclusive = padded;
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(kFullWarp, inclusive, step);
            if (lane >= step) inclusive += other;
        }
        if (first + lane < num_local) base[expert] = rows + inclusive - padded + before_me;
        rows += __shfl_sync(kFullWarp, inclusive, 31);
    }
    return rows;
}

__global__ void exchange(const __grid_constant__ GpuPlanParams p) {
    const GpuWorkspaceConfig& config = p.context.config;
    const Workspace own(p.context, p.context.rank);
    __shared__ int ok;
    if (threadIdx.x == 0) ok = 1;
    sum_and_send(p);
    __syncthreads();
    if (threadIdx.x < config.num_ranks) {
        const int peer = threadIdx.x;
        const Workspace theirs(p.context, peer);
        if (p.refuse || *static_cast<volatile int*>(p.context.gave_up) != 0) store_release(theirs.refused(p.context.rank), p.context.sequence);
        if (!p.cached) store_release(theirs.counts_ready(p.context.rank), p.context.sequence);
        store_release(theirs.entered(p.context.rank), p.context.sequence);
        const bool entered = wait_flag(p.context, own.entered(peer), p.context.sequence, peer, GpuPhase::kEntry);
        if (!entered || (!p.cached && !wait_flag(p.context, own.counts_ready(peer), p.context.sequence, peer, GpuPhase::kCounts))) ok = 0;
        if (load_acquire(own.refused(peer)) == p.context.sequence && peer != p.context.rank) report(p.context, kPeerRefused, peer, GpuPhase::kNone, 0, 0);
        if (*static_cast<volatile int*>(p.context.gave_up) != 0) ok = 0;
    }
    __syncthreads();
    if (!ok || p.cached) return;
    const int warp = threadIdx.x / 32;
    if (warp < config.num_ranks) {
        const int rows = lay_out_rank(p, warp, p.routing.expert_row_base);
        if (warp == p.context.rank && threadIdx.x % 32 == 0) {
            long long num_tokens = 0;
            for (int source = 0; source < config.num_ranks; ++source) {
                const int count = own.counts(p.context.sequence, source)[config.num_experts + p.context.rank];
                p.recv_counts[source] = count;
                num_tokens += count;
            }
            const long long num_rows = p.is_expert_layout ? rows : num_tokens;
            if (p.num_recv_rows_bound >= 0 && num_rows > p.num_recv_rows_bound)
                report(p.context, kBoundExceeded, p.context.rank, GpuPhase::kNone, p.num_recv_rows_bound, num_rows);
            volatile GpuCounts* counts = p.context.counts;
            counts->num_recv_tokens = num_tokens;
            counts->num_rows = num_rows;
            store_release(&p.context.counts->sequence, p.context.sequence);
        }
    }
}

// Slots and rows of every token, a thread a token.
__global__ void place_tokens(const __grid_constant__ GpuPlanParams p) {
    const GpuWorkspaceConfig& config = p.context.config;
    const GpuRouting& r = p.routing;
    const int64_t token = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (token >= r.num_tokens) return;
    const int num_local = config.num_experts / config.num_ranks;
    const int32_t* before = r.segment_counts + token / kTokensPerSegment * (config.num_experts + config.num_ranks);
    for (int rank = 0; rank < config.num_ranks; ++rank) {
        int32_t& slot = r.send_slot[token * config.num_ranks + rank];
        if (slot < 0) continue;
        slot += before[config.num_experts + rank];
        r.send_token[rank * config.num_max_tokens + slot] = static_cast<int32_t>(token);
    }
    for (int k = 0; k < config.num_topk; ++k) {
        const int64_t entry = token * config.num_topk + k;
        const int expert = expert_at(r, entry);
        if (expert < 0 || expert >= config.num_experts)
            r.send_row_idx[entry] = -1;
        else if (!p.is_expert_layout)
            r.send_row_idx[entry] = expert % num_local;
        else if (!p.cached)
            r.send_row_idx[entry] = r.expert_row_base[expert] + before[expert] + r.index_in_segment[entry];
    }
}

void check(const char* what) {
    if (const cudaError_t status = cudaGetLastError(); status != cudaSuccess)
        throw std::runtime_error(std::string("launch of ") + what + " failed: " + cudaGetErrorString(status));
}

}  // namespace

void launch_plan(const GpuPlanParams& p, void* stream) {
    auto* on = static_cast<cudaStream_t>(stream);
    const GpuWorkspaceConfig& config = p.context.config;
    const int segments = static_cast<int>(divide_up(p.routing.num_tokens, kTokensPerSegment));
    if (segments > 0 && !p.refuse) count_segments<<<segments, 32, sizeof(int32_t) * (config.num_experts + config.num_ranks), on>>>(p);
    exchange<<<1, kExchangeThreads, 0, on>>>(p);
    if (segments > 0 && !p.refuse) place_tokens<<<static_cast<int>(divide_up(p.routing.num_tokens, 128)), 128, 0, on>>>(p);
    check("plan");
}

}  // namespace deepep_moe

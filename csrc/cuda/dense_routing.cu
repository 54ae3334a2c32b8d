// Converts and counts dense routing on GPUs, with one warp a token.
//
//   lanes_of_map     Reads 32 experts at a time; a chosen expert's top-k entry is the number of chosen ones before it.
//
//   dense_of_lanes   Writes a row of zeros, then the value of each top-k entry.
//
//   count_lanes      Sets a bit for each expert and rank of a token, so that each counts once. A block sums up before it adds to the
//                    result.
#include <algorithm>

#include "cuda/device/launch.cuh"
#include "cuda/device/sync.cuh"
#include "cuda/launch.h"

namespace deepep_moe {
namespace {

constexpr int kWarps = kRowThreads / 32;
constexpr int kMostBlocks = 512;  // blocks of count_lanes

__host__ __device__ constexpr int words_of(int num_bits) { return (num_bits + 31) / 32; }

__global__ void __launch_bounds__(kRowThreads) lanes_of_map(const __grid_constant__ LanesOfMapParams p) {
    const int64_t token = warp_of_grid();
    const int num_experts = static_cast<int>(p.sizes.num_experts), num_topk = static_cast<int>(p.sizes.num_topk);
    if (token >= p.sizes.num_tokens) return;
    const int lane = threadIdx.x % 32;
    const uint8_t* chosen_here = p.routing_map + token * num_experts;
    int64_t* const lanes = p.topk_idx + token * num_topk;
    int count = 0;
    for (int first = 0; first < num_experts; first += 32) {
        const int expert = first + lane;
        const bool is_chosen = expert < num_experts && chosen_here[expert] != 0;
        const unsigned chosen = __ballot_sync(kFullWarp, is_chosen);
        const int place = count + __popc(chosen & ((1u << lane) - 1));
        if (is_chosen && place < num_topk) {
            lanes[place] = expert;
            if (p.values != nullptr) p.topk_values[token * num_topk + place] = p.values[token * num_experts + expert];
        }
        count += __popc(chosen);
    }
    __syncwarp();  // thread 0 may overwrite an entry of another thread
    if (lane == 0 && count > num_topk && num_topk > 0) lanes[0] = num_experts;
    for (int place = count + lane; place < num_topk; place += 32) {
        lanes[place] = -1;
        if (p.values != nullptr) p.topk_values[token * num_topk + place] = 0.0f;
    }
}

__global__ void __launch_bounds__(kRowThreads) dense_of_lanes(const __grid_constant__ DenseOfLanesParams p) {
    const int64_t token = warp_of_grid(), num_experts = p.sizes.num_experts, num_topk = p.sizes.num_topk;
    if (token >= p.sizes.num_tokens) return;
    const int lane = threadIdx.x % 32;
    float* const row = p.values + token * num_experts;
    for (int64_t expert = lane; expert < num_experts; expert += 32) row[expert] = 0.0f;
    __syncwarp();
    for (int64_t place = lane; place < num_topk; place += 32) {
        const int64_t expert = p.topk_idx[token * num_topk + place];
        if (expert >= 0 && expert < num_experts) row[expert] = p.topk_values[token * num_topk + place];
    }
}

// Set a bit; return whether it was not set before.
__device__ bool is_first(unsigned* bits, int which) {
    const unsigned bit = 1u << which % 32;
    return (atomicOr(bits + which / 32, bit) & bit) == 0;
}

__device__ int64_t expert_in(const CountLanesParams& p, int64_t at) {
    return p.is_int64 ? static_cast<const int64_t*>(p.topk_idx)[at] : static_cast<const int32_t*>(p.topk_idx)[at];
}

// Shared memory holds counts of ranks, then of experts, then for each warp bits of experts and of ranks.
__global__ void __launch_bounds__(kRowThreads) count_lanes(const __grid_constant__ CountLanesParams p) {
    const int num_experts = static_cast<int>(p.sizes.num_experts), num_ranks = static_cast<int>(p.num_ranks);
    const int num_local = num_experts / num_ranks, num_counts = num_ranks + num_experts, num_words = words_of(num_counts);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int* const counts = shared_memory<int>();
    unsigned* const bits = reinterpret_cast<unsigned*>(counts + num_counts) + warp * num_words;
    for (int i = threadIdx.x; i < num_counts; i += kRowThreads) counts[i] = 0;
    __syncthreads();
    for (int64_t token = warp_of_grid(); token < p.sizes.num_tokens; token += static_cast<int64_t>(gridDim.x) * kWarps) {
        uint8_t* const in_rank = p.is_token_in_rank + token * num_ranks;
        for (int i = lane; i < num_words; i += 32) bits[i] = 0;
        for (int rank = lane; rank < num_ranks; rank += 32) in_rank[rank] = 0;
        __syncwarp();
        for (int64_t place = lane; place < p.sizes.num_topk; place += 32) {
            const int64_t chosen = expert_in(p, token * p.sizes.num_topk + place);
            if (chosen < 0 || chosen >= num_experts) continue;
            const int expert = static_cast<int>(chosen), rank = expert / num_local;
            if (is_first(bits, expert)) atomicAdd(counts + num_ranks + expert, 1);
            if (!is_first(bits, num_experts + rank)) continue;
            atomicAdd(counts + rank, 1);
            in_rank[rank] = 1;
        }
        __syncwarp();
    }
    __syncthreads();
    for (int i = threadIdx.x; i < num_counts; i += kRowThreads)
        if (counts[i] != 0) atomicAdd(p.counts + i, counts[i]);
}

}  // namespace

void launch_lanes_of_map(const LanesOfMapParams& p, void* stream) {
    launch<lanes_of_map>("lanes_of_map", blocks_of_warps(p.sizes.num_tokens), kRowThreads, 0, p, stream);
}

void launch_count_lanes(const CountLanesParams& p, void* stream) {
    const int num_counts = static_cast<int>(p.num_ranks + p.sizes.num_experts),
              shared_bytes = 4 * (num_counts + kWarps * words_of(num_counts));
    launch<count_lanes>("count_lanes", std::min(blocks_of_warps(p.sizes.num_tokens), kMostBlocks), kRowThreads, shared_bytes, p, stream);
}

void launch_dense_of_lanes(const DenseOfLanesParams& p, void* stream) {
    launch<dense_of_lanes>("dense_of_lanes", blocks_of_warps(p.sizes.num_tokens), kRowThreads, 0, p, stream);
}

}  // namespace deepep_moe

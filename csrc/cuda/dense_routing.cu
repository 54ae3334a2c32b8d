// The conversions of dense routing on GPUs: a warp a token. Nothing waits for another block.
//
//   lanes_of_map     32 experts at a time: a chosen one's lane is the number of chosen ones before it
//   dense_of_lanes   a row of zeros, then the value of each lane
#include "cuda/device/launch.cuh"
#include "cuda/device/sync.cuh"
#include "cuda/launch.h"

namespace deepep_moe {
namespace {

constexpr int kThreads = 256;

__device__ int64_t token_of_warp() { return (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 32; }

__global__ void __launch_bounds__(kThreads) lanes_of_map(const __grid_constant__ LanesOfMapParams p) {
    const int64_t token = token_of_warp();
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
    __syncwarp();  // lane 0 may write over what another one has written
    if (lane == 0 && count > num_topk && num_topk > 0) lanes[0] = num_experts;
    for (int place = count + lane; place < num_topk; place += 32) {
        lanes[place] = -1;
        if (p.values != nullptr) p.topk_values[token * num_topk + place] = 0.0f;
    }
}

__global__ void __launch_bounds__(kThreads) dense_of_lanes(const __grid_constant__ DenseOfLanesParams p) {
    const int64_t token = token_of_warp(), num_experts = p.sizes.num_experts, num_topk = p.sizes.num_topk;
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

int num_blocks(int64_t num_tokens) { return static_cast<int>(divide_up(num_tokens, int64_t{kThreads / 32})); }

}  // namespace

void launch_lanes_of_map(const LanesOfMapParams& p, void* stream) {
    launch<lanes_of_map>("lanes_of_map", num_blocks(p.sizes.num_tokens), kThreads, 0, p, stream);
}

void launch_dense_of_lanes(const DenseOfLanesParams& p, void* stream) {
    launch<dense_of_lanes>("dense_of_lanes", num_blocks(p.sizes.num_tokens), kThreads, 0, p, stream);
}

}  // namespace deepep_moe

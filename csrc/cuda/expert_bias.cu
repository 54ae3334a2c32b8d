// Updates expert biases to balance loads without an auxiliary loss (Wang et al. 2024, arXiv 2408.15664, algorithm 1). One warp handles one
// layer and sums the layer's counts first. No block waits for another.
#include "cuda/device/launch.cuh"
#include "cuda/device/sync.cuh"
#include "cuda/launch.h"

namespace deepep_moe {
namespace {

__device__ long long load_count(const GpuExpertBiasParams& p, int64_t at) {
    return p.is_int64 ? static_cast<const int64_t*>(p.num_tokens_per_expert)[at] : static_cast<const int32_t*>(p.num_tokens_per_expert)[at];
}

__global__ void __launch_bounds__(kRowThreads) update_expert_bias(const __grid_constant__ GpuExpertBiasParams p) {
    const int layer = blockIdx.x * (kRowThreads / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (layer >= p.num_layers) return;
    const int64_t row = static_cast<int64_t>(layer) * p.num_experts;
    long long total = 0;
    for (int expert = lane; expert < p.num_experts; expert += 32) total += load_count(p, row + expert);
    for (int step = 16; step >= 1; step /= 2) total += __shfl_xor_sync(kFullWarp, total, step);
    for (int expert = lane; expert < p.num_experts; expert += 32) {
        const long long missing = total - load_count(p, row + expert) * p.num_experts;  // times num_experts
        const float direction = missing > 0 ? 1.0f : missing < 0 ? -1.0f : 0.0f;
        p.expert_bias[row + expert] = __fadd_rn(p.expert_bias[row + expert], __fmul_rn(direction, p.update_rate));
    }
}

}  // namespace

void launch_update_expert_bias(const GpuExpertBiasParams& p, void* stream) {
    launch<update_expert_bias>("update_expert_bias", blocks_of_warps(p.num_layers), kRowThreads, 0, p, stream);
}

}  // namespace deepep_moe

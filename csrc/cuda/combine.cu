// Combine on one NVLink host. Sending blocks sum a token's rows on this rank and push the sum to its source, chunk by chunk; receiving
// blocks add up, in rank order, the sums of a token once the chunks that hold them have arrived.
#include <stdexcept>
#include <string>

#include "cuda/device/rows.cuh"
#include "cuda/launch.h"

namespace deepep_moe {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;

template <DType kType>
struct Kernel {
    using Values = Piece<kType>;
    const GpuCombineParams& p;
    const GpuWorkspaceConfig& config;
    const int64_t row_bytes;
    const GpuSlotLayout slot;
    const int warp, lane;

    __device__ explicit Kernel(const GpuCombineParams& p)
        : p(p), config(p.context.config), row_bytes(config.hidden * (16 / Values::kCount)), slot(config.num_topk, row_bytes, 0),
          warp(threadIdx.x / 32), lane(threadIdx.x % 32) {}

    // ---- the expert side: each block serves one source, this rank included ----

    __device__ void send(int block) const {
        const int peer = (p.context.rank + block) % config.num_ranks;
        const int step = (p.num_send_blocks - 1 - block % config.num_ranks) / config.num_ranks + 1;
        const Workspace theirs(p.context, peer);
        const int count = p.recv_counts[peer];
        int64_t first = 0;
        for (int before = 0; before < peer; ++before) first += p.recv_counts[before];
        for (int chunk = block / config.num_ranks; chunk * kChunkSlots < count; chunk += step) {
            const int end = min((chunk + 1) * kChunkSlots, count);
            for (int i = chunk * kChunkSlots + warp; i < end; i += kWarps) reduce(first + i, theirs.slot(p.context.rank, i, slot));
            __syncthreads();
            if (threadIdx.x == 0) store_release(theirs.arrived(p.context.rank, chunk), p.context.sequence);
        }
    }

    __device__ void reduce(int64_t recv_token, std::byte* to) const {
        int row = lane == 0 ? static_cast<int>(recv_token) : -1;
        if (p.is_expert_layout) row = lane < config.num_topk ? p.recv_row_idx[recv_token * config.num_topk + lane] : -1;
        if (p.lane_values != nullptr && lane < config.num_topk) {
            float value = 0;
            if (!p.is_expert_layout) value = p.lane_values[recv_token * config.num_topk + lane];
            if (p.is_expert_layout && row >= 0) value = p.lane_values[row];
            reinterpret_cast<float*>(to + slot.weights_offset)[lane] = value;
        }
        const unsigned there = __ballot_sync(kFullWarp, row >= 0);
        row = __shfl_sync(kFullWarp, row, nth_set(there, lane));  // lane n: the n-th row, in order of top-k
        const float weight = row >= 0 && p.weights != nullptr ? p.weights[row] : 1.0f;
        const auto rows = [&](int n) { return pieces(p.x + static_cast<int64_t>(__shfl_sync(kFullWarp, row, n)) * row_bytes); };
        const auto weights = [&](int n) { return __shfl_sync(kFullWarp, weight, n); };
        const auto use = [&](int64_t piece, const float* sum) { pieces(to)[piece] = Values::store(sum); };
        if (p.weights != nullptr)
            sum_rows<Values, true>(row_bytes / 16, __popc(there), rows, weights, use);
        else
            sum_rows<Values, false>(row_bytes / 16, __popc(there), rows, weights, use);
    }

    // ---- the source side: a warp a token ----

    __device__ void receive(int block, int num_blocks) const {
        const Workspace own(p.context, p.context.rank);
        for (int64_t token = static_cast<int64_t>(block) * kWarps + warp; token < p.routing.num_tokens; token += static_cast<int64_t>(num_blocks) * kWarps) {
            const int index = lane < config.num_ranks ? p.routing.send_slot[token * config.num_ranks + lane] : -1;
            bool ok = true;
            if (index >= 0) ok = wait_flag(p.context, own.arrived(lane, index / kChunkSlots), p.context.sequence, lane, GpuPhase::kCombineRows);
            if (!__all_sync(kFullWarp, ok)) return;
            __syncwarp();  // what one lane has seen arrive, all may read
            finish(own, token, index);
        }
    }

    __device__ void finish(const Workspace& own, int64_t token, int index) const {
        const unsigned ranks = __ballot_sync(kFullWarp, index >= 0);
        const int rank = nth_set(ranks, lane), there = __shfl_sync(kFullWarp, index, rank);  // lane n: the n-th rank and its slot
        const auto rows = [&](int n) {
            return pieces(static_cast<const std::byte*>(own.slot(__shfl_sync(kFullWarp, rank, n), __shfl_sync(kFullWarp, there, n), slot)));
        };
        const auto weights = [](int) { return 1.0f; };
        const auto use = [&](int64_t piece, float* sum) {
            if (p.bias != nullptr) {
                float x[Values::kCount];
                Values::load(pieces(p.bias + token * row_bytes)[piece], x);
#pragma unroll
                for (int v = 0; v < Values::kCount; ++v) sum[v] = __fadd_rn(sum[v], x[v]);
            }
            pieces(p.combined_x + token * row_bytes)[piece] = Values::store(sum);
        };
        sum_rows<Values, false>(row_bytes / 16, __popc(ranks), rows, weights, use);
        if (p.combined_lane_values != nullptr) take_lane_values(own, token, index);
    }

    __device__ void take_lane_values(const Workspace& own, int64_t token, int index) const {
        const int64_t entry = token * config.num_topk + lane;
        int expert = -1;
        if (lane < config.num_topk)
            expert = p.routing.is_int64 ? static_cast<int>(static_cast<const int64_t*>(p.routing.topk_idx)[entry])
                                        : static_cast<const int32_t*>(p.routing.topk_idx)[entry];
        const int rank = expert >= 0 ? expert / (config.num_experts / config.num_ranks) : 0;
        const int there = __shfl_sync(kFullWarp, index, rank);
        if (lane >= config.num_topk) return;
        const auto* values = reinterpret_cast<const float*>(own.slot(rank, max(there, 0), slot) + slot.weights_offset);
        p.combined_lane_values[entry] = expert >= 0 ? values[lane] : 0.0f;
    }
};

template <DType kType>
__global__ void __launch_bounds__(kThreads, 1) combine(const __grid_constant__ GpuCombineParams p) {
    const Kernel<kType> kernel(p);
    if (*static_cast<volatile int*>(p.context.gave_up) != 0) return;
    if (static_cast<int>(blockIdx.x) < p.num_send_blocks)
        kernel.send(blockIdx.x);
    else
        kernel.receive(blockIdx.x - p.num_send_blocks, gridDim.x - p.num_send_blocks);
}

}  // namespace

void launch_combine(const GpuCombineParams& p, void* stream) {
    constexpr int kReceiveBlocks = 64;
    const int blocks = p.num_send_blocks + kReceiveBlocks;
    auto* on = static_cast<cudaStream_t>(stream);
    switch (p.dtype) {
        case DType::kFloat32: combine<DType::kFloat32><<<blocks, kThreads, 0, on>>>(p); break;
        case DType::kBFloat16: combine<DType::kBFloat16><<<blocks, kThreads, 0, on>>>(p); break;
        case DType::kFloat16: combine<DType::kFloat16><<<blocks, kThreads, 0, on>>>(p); break;
        case DType::kFloat8: throw std::invalid_argument("fp8 rows cannot be summed; combine takes fp32, bf16 or fp16");
    }
    if (const cudaError_t status = cudaGetLastError(); status != cudaSuccess)
        throw std::runtime_error(std::string("launch of combine failed: ") + cudaGetErrorString(status));
}

}  // namespace deepep_moe

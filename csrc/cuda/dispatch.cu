// Dispatch on one NVLink host. Sending blocks push whole rows into slots in the peers' memory, chunk by chunk, a flag a chunk;
// receiving blocks expand each chunk into its final rows while later ones still fly. Rows that stay on the rank go straight from x.
#include <stdexcept>
#include <string>

#include "cuda/device/rows.cuh"
#include "cuda/launch.h"

namespace deepep_moe {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;

struct Kernel {
    const GpuDispatchParams& p;
    const GpuWorkspaceConfig& config;
    const GpuSlotLayout slot;
    const int warp, lane;

    __device__ explicit Kernel(const GpuDispatchParams& p)
        : p(p), config(p.context.config), slot(config.num_topk, p.row_bytes, p.scale_bytes), warp(threadIdx.x / 32), lane(threadIdx.x % 32) {}

    // ---- sending: each block serves one peer ----

    __device__ void send(int block) const {
        const int peer = (p.context.rank + 1 + block % (config.num_ranks - 1)) % config.num_ranks;
        const int first = block / (config.num_ranks - 1);
        const int step = (p.num_send_blocks - 1 - block % (config.num_ranks - 1)) / (config.num_ranks - 1) + 1;
        const Workspace theirs(p.context, peer);
        const int count = p.routing.send_counts[peer];
        for (int chunk = first; chunk * kChunkSlots < count; chunk += step) {
            const int end = min((chunk + 1) * kChunkSlots, count);
            for (int i = chunk * kChunkSlots + warp; i < end; i += kWarps) fill_slot(theirs.slot(p.context.rank, i, slot), peer, i);
            __syncthreads();
            if (threadIdx.x == 0) store_release(theirs.arrived(p.context.rank, chunk), p.context.sequence);
        }
    }

    __device__ void fill_slot(std::byte* to, int peer, int index) const {
        const int64_t token = p.routing.send_token[peer * config.num_max_tokens + index];
        copy_row(to, p.x + token * p.row_bytes, p.row_bytes);
        for (int k = lane; k < config.num_topk; k += 32) {
            reinterpret_cast<int32_t*>(to + slot.lanes_offset)[k] = lane_target(token, k, peer);
            if (p.topk_weights != nullptr) reinterpret_cast<float*>(to + slot.weights_offset)[k] = p.topk_weights[token * config.num_topk + k];
        }
        if (p.x_scales != nullptr) copy_scales(to + slot.scales_offset, p.x_scales + token * p.scale_bytes);
    }

    // Where lane k of a token goes on rank `peer`: a row of recv_x (expert layout), a local expert (rank layout), or -1.
    __device__ int lane_target(int64_t token, int k, int peer) const {
        const int64_t entry = token * config.num_topk + k;
        const int expert = p.routing.is_int64 ? static_cast<int>(static_cast<const int64_t*>(p.routing.topk_idx)[entry])
                                              : static_cast<const int32_t*>(p.routing.topk_idx)[entry];
        const int num_local = config.num_experts / config.num_ranks;
        return expert >= 0 && expert / num_local == peer ? p.routing.send_row_idx[entry] : -1;
    }

    __device__ void copy_scales(std::byte* to, const std::byte* from) const {
        for (int64_t i = lane; i < p.scale_bytes / 4; i += 32) reinterpret_cast<float*>(to)[i] = reinterpret_cast<const float*>(from)[i];
    }

    // ---- receiving: blocks take chunks of all sources in turn ----

    __device__ void receive(int block, int num_blocks) const {
        const Workspace own(p.context, p.context.rank);
        __shared__ int ok;
        const int num_chunks = static_cast<int>(own.layout.num_chunks);
        for (int task = block; task < num_chunks * config.num_ranks; task += num_blocks) {
            const int chunk = task / config.num_ranks, source = task % config.num_ranks;
            const int count = p.recv_counts[source];
            if (chunk * kChunkSlots >= count) continue;
            if (threadIdx.x == 0)
                ok = source == p.context.rank ||
                     wait_flag(p.context, own.arrived(source, chunk), p.context.sequence, source, GpuPhase::kDispatchRows);
            __syncthreads();
            if (!ok) return;
            int64_t first = 0;
            for (int before = 0; before < source; ++before) first += p.recv_counts[before];
            const int end = min((chunk + 1) * kChunkSlots, count);
            for (int i = chunk * kChunkSlots + warp; i < end; i += kWarps) deliver(own, source, i, first + i);
            __syncthreads();
        }
        zero_rest(block, num_blocks);
    }

    __device__ void deliver(const Workspace& own, int source, int index, int64_t recv_token) const {
        const std::byte *row = own.slot(source, index, slot), *scales = row + slot.scales_offset;
        int target = -1;
        float weight = 0;
        if (source == p.context.rank) {
            const int64_t token = p.routing.send_token[source * config.num_max_tokens + index];
            row = p.x + token * p.row_bytes;
            scales = p.x_scales + token * p.scale_bytes;
            if (lane < config.num_topk) target = lane_target(token, lane, source);
            if (lane < config.num_topk && p.topk_weights != nullptr) weight = p.topk_weights[token * config.num_topk + lane];
        } else if (lane < config.num_topk) {
            target = reinterpret_cast<const int32_t*>(row + slot.lanes_offset)[lane];
            if (p.recv_topk_weights != nullptr) weight = reinterpret_cast<const float*>(row + slot.weights_offset)[lane];
        }
        if (p.is_expert_layout)
            expand(row, scales, recv_token, target, weight);
        else
            place(row, scales, recv_token, target, weight);
    }

    __device__ void place(const std::byte* row, const std::byte* scales, int64_t to, int expert, float weight) const {
        if (to >= p.num_rows) return;
        copy_row(p.recv_x + to * p.row_bytes, row, p.row_bytes);
        if (p.recv_x_scales != nullptr) copy_scales(p.recv_x_scales + to * p.scale_bytes, scales);
        if (lane >= config.num_topk) return;
        const int64_t entry = to * config.num_topk + lane;
        if (p.recv_topk_idx != nullptr && p.recv_topk_idx_is_int64) static_cast<int64_t*>(p.recv_topk_idx)[entry] = expert;
        if (p.recv_topk_idx != nullptr && !p.recv_topk_idx_is_int64) static_cast<int32_t*>(p.recv_topk_idx)[entry] = expert;
        if (p.recv_topk_weights != nullptr) p.recv_topk_weights[entry] = expert >= 0 ? weight : 0.0f;
    }

    __device__ void expand(const std::byte* row, const std::byte* scales, int64_t recv_token, int target, float weight) const {
        int32_t* row_idx = p.recv_row_idx + recv_token * config.num_topk;
        if (lane < config.num_topk) {
            if (p.cached) target = row_idx[lane];
            if (target >= p.num_rows) target = -1;
            if (!p.cached) row_idx[lane] = target;
            if (target >= 0 && p.recv_topk_weights != nullptr) p.recv_topk_weights[target] = weight;
        }
        const unsigned targets = __ballot_sync(kFullWarp, target >= 0);
        const auto each_target = [&](auto&& use) {
            for (unsigned rest = targets; rest != 0; rest &= rest - 1) use(static_cast<int64_t>(__shfl_sync(kFullWarp, target, __ffs(rest) - 1)));
        };
        each_target([&](int64_t to) { copy_row(p.recv_x + to * p.row_bytes, row, p.row_bytes); });
        if (p.recv_x_scales != nullptr) each_target([&](int64_t to) { copy_scales(p.recv_x_scales + to * p.scale_bytes, scales); });
    }

    // Rows that nobody sends: padding of the experts' groups, and the rest up to a bound.
    __device__ void zero_rest(int block, int num_blocks) const {
        int64_t end = 0;
        if (p.is_expert_layout) {
            for (int expert = 0; expert < config.num_experts / config.num_ranks; ++expert) {
                const int64_t begin = end + p.num_recv_tokens_per_expert[expert];
                end += divide_up(begin - end, p.expert_alignment) * p.expert_alignment;
                if (expert % num_blocks == block) zero_rows(begin, min(end, p.num_rows), warp, kWarps);
            }
        } else {
            for (int source = 0; source < config.num_ranks; ++source) end += p.recv_counts[source];
        }
        zero_rows(end, p.num_rows, block * kWarps + warp, num_blocks * kWarps);
    }

    __device__ void zero_rows(int64_t begin, int64_t end, int first, int step) const {
        for (int64_t row = begin + first; row < end; row += step) {
            zero_row(p.recv_x + row * p.row_bytes, p.row_bytes);
            for (int64_t i = lane; i < p.scale_bytes / 4 && p.recv_x_scales != nullptr; i += 32)
                reinterpret_cast<float*>(p.recv_x_scales + row * p.scale_bytes)[i] = 0.0f;
            const int num_weights = p.recv_topk_weights == nullptr ? 0 : p.is_expert_layout ? 1 : config.num_topk;
            if (lane < num_weights) p.recv_topk_weights[row * num_weights + lane] = 0.0f;
        }
    }
};

__global__ void __launch_bounds__(kThreads, 1) dispatch(const __grid_constant__ GpuDispatchParams p) {
    const Kernel kernel(p);
    if (*static_cast<volatile int*>(p.context.gave_up) != 0) return;
    if (static_cast<int>(blockIdx.x) < p.num_send_blocks)
        kernel.send(blockIdx.x);
    else
        kernel.receive(blockIdx.x - p.num_send_blocks, gridDim.x - p.num_send_blocks);
}

}  // namespace

void launch_dispatch(const GpuDispatchParams& p, void* stream) {
    constexpr int kReceiveBlocks = 64;
    dispatch<<<p.num_send_blocks + kReceiveBlocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(p);
    if (const cudaError_t status = cudaGetLastError(); status != cudaSuccess)
        throw std::runtime_error(std::string("launch of dispatch failed: ") + cudaGetErrorString(status));
}

}  // namespace deepep_moe

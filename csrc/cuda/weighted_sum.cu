// Computes weighted sums of rows, y = sum over top-k of weight * x, and their gradients. Every sum is rounded to fp32, and every product
// unless it is fused with the sum. A row is rounded once.
//
//   weighted_sum             Each warp sums one token, with 4 pieces of each row in flight, top-k entries ascending from +0.
//
//   weighted_sum_backward    Each warp takes up to 4 rows of one token and reads the token's gradient once for them.
#include "cuda/device/launch.cuh"
#include "cuda/device/rows.cuh"
#include "cuda/launch.h"

namespace deepep_moe {
namespace {

constexpr int kBatch = 4;  // pieces of each row in flight
constexpr int kLanes = 4;  // top-k entries that a warp of the backward takes

using Params = GpuWeightedSumParams;

// Returns the row of (lane, token).
__device__ int64_t row_of(const Params& p, int64_t lane, int64_t token) { return lane * p.lane_stride + token * p.token_stride; }

template <DType kType>
__global__ void __launch_bounds__(kRowThreads) weighted_sum(const __grid_constant__ Params p) {
    using Values = Piece<kType>;
    const int64_t token = warp_of_grid();
    if (token >= p.num_tokens) return;
    const int num_pieces = static_cast<int>(p.hidden / Values::kCount);
    const auto rows = [&](int lane) { return pieces(p.rows) + row_of(p, lane, token) * num_pieces; };
    const auto weights = [&](int lane) { return p.weights[row_of(p, lane, token)]; };
    uint4* to = pieces(p.sums) + token * num_pieces;
    for (int batch = 0; batch < num_pieces; batch += 32 * kBatch) {
        const int first = batch + threadIdx.x % 32;
        float sum[kBatch][Values::kCount] = {};
        const uint4 none[kBatch] = {};
        if (p.is_fused)
            sum_pieces<Values, kBatch, true>(sum, first, num_pieces, p.num_topk, rows, weights, none);
        else
            sum_pieces<Values, kBatch>(sum, first, num_pieces, p.num_topk, rows, weights, none);
#pragma unroll
        for (int j = 0; j < kBatch; ++j)
            if (first + 32 * j < num_pieces) to[first + 32 * j] = Values::store(sum[j]);
    }
}

template <DType kType>
__global__ void __launch_bounds__(kRowThreads) weighted_sum_backward(const __grid_constant__ Params p) {
    using Values = Piece<kType>;
    const int64_t groups = divide_up(p.num_topk, kLanes), token = warp_of_grid() / groups, num_pieces = p.hidden / Values::kCount;
    const int first_lane = static_cast<int>(warp_of_grid() % groups) * kLanes, num_lanes = min(kLanes, p.num_topk - first_lane);
    if (token >= p.num_tokens) return;
    const int64_t first_row = row_of(p, first_lane, token);
    float weights[kLanes], sums[kLanes] = {};
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) weights[lane] = lane < num_lanes ? p.weights[first_row + lane * p.lane_stride] : 0.0f;
    for (int64_t i = threadIdx.x % 32; i < num_pieces; i += 32) {
        uint4 raw[kLanes];
        float grad[Values::kCount];
        Values::load(pieces(p.grad)[token * num_pieces + i], grad);
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane)
            if (lane < num_lanes) raw[lane] = pieces(p.rows)[(first_row + lane * p.lane_stride) * num_pieces + i];
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
            if (lane >= num_lanes) continue;
            float x[Values::kCount];
            Values::load(raw[lane], x);
#pragma unroll
            for (int j = 0; j < Values::kCount; ++j) {
                sums[lane] = __fadd_rn(sums[lane], __fmul_rn(grad[j], x[j]));
                x[j] = __fmul_rn(grad[j], weights[lane]);
            }
            pieces(p.grad_rows)[(first_row + lane * p.lane_stride) * num_pieces + i] = Values::store(x);
        }
    }
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
#pragma unroll
        for (int step = 16; step >= 1; step /= 2) sums[lane] += __shfl_xor_sync(kFullWarp, sums[lane], step);
        if (lane < num_lanes && threadIdx.x % 32 == 0) p.grad_weights[first_row + lane * p.lane_stride] = sums[lane];
    }
}

}  // namespace

void launch_weighted_sum(const GpuWeightedSumParams& p, void* stream) {
    with_dtype(p.dtype, "fp8 rows are not weighted", [&](auto dtype) {
        launch<weighted_sum<dtype.value>>("weighted_sum", blocks_of_warps(p.num_tokens), kRowThreads, 0, p, stream);
    });
}

void launch_weighted_sum_backward(const GpuWeightedSumParams& p, void* stream) {
    const int blocks = blocks_of_warps(p.num_tokens * divide_up(p.num_topk, kLanes));
    with_dtype(p.dtype, "fp8 rows have no gradient",
               [&](auto dtype) { launch<weighted_sum_backward<dtype.value>>("weighted_sum_backward", blocks, kRowThreads, 0, p, stream); });
}

}  // namespace deepep_moe

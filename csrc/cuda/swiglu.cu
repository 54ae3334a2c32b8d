// Computes SwiGLU of rows, y = silu(gate) * up * prob, and its gradients. Rows are grouped by expert; last rows without one are skipped.
// The kernels read the groups' ends on the device.
//
//   swiglu             One warp a row, with kBatch pieces of gate and of up in flight.
//   swiglu_backward    One warp a row: reads gate, up and the gradient once, and may write y again.
//   clear_tail         Writes zeros to the last rows, which belong to no group, and touches no other row.
//
// silu, its gradient and each product are rounded to the rows' dtype, as PyTorch's single operators round. No block waits for another.
#include <algorithm>

#include "cuda/device/launch.cuh"
#include "cuda/device/rows.cuh"
#include "cuda/launch.h"

namespace deepep_moe {
namespace {

constexpr int kBatch = 2;            // pieces of a thread in flight
constexpr int kMaxTailBlocks = 512;  // a tail is short as a rule

using Params = GpuSwigluParams;

// Returns the number of rows that have an expert.
__device__ int64_t num_filled(const Params& p) {
    return p.group_ends == nullptr ? p.num_rows : min(p.num_rows, static_cast<int64_t>(p.group_ends[p.num_groups - 1]));
}

__device__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

template <class Values>
__device__ void round_to_dtype(float (&x)[Values::kCount]) {
    Values::load(Values::store(x), x);
}

// Holds a piece of gate and of up, silu(gate) and its product with up.
template <class Values>
struct Unit {
    float gate[Values::kCount], up[Values::kCount], activated[Values::kCount], product[Values::kCount];

    __device__ Unit(const uint4& raw_gate, const uint4& raw_up) {
        Values::load(raw_gate, gate);
        Values::load(raw_up, up);
#pragma unroll
        for (int j = 0; j < Values::kCount; ++j) activated[j] = gate[j] / (1.0f + expf(-gate[j]));
        round_to_dtype<Values>(activated);
#pragma unroll
        for (int j = 0; j < Values::kCount; ++j) product[j] = activated[j] * up[j];
        round_to_dtype<Values>(product);
    }

    __device__ uint4 output(float prob) const {
        float y[Values::kCount];
#pragma unroll
        for (int j = 0; j < Values::kCount; ++j) y[j] = product[j] * prob;
        return Values::store(y);
    }
};

template <DType kType>
__global__ void __launch_bounds__(kRowThreads) swiglu(const __grid_constant__ Params p) {
    using Values = Piece<kType>;
    const int64_t row = warp_of_grid();
    if (row >= num_filled(p)) return;
    const int num_pieces = static_cast<int>(p.num_columns / Values::kCount), lane = threadIdx.x % 32;
    const uint4 *gates = pieces(p.inner) + row * 2 * num_pieces, *ups = gates + num_pieces;
    uint4* to = pieces(p.y) + row * num_pieces;
    const float prob = p.probs == nullptr ? 1.0f : p.probs[row];
#pragma unroll 1
    for (int first = lane; first < num_pieces; first += 32 * kBatch) {
        uint4 gate[kBatch], up[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
            if (first + 32 * i < num_pieces) gate[i] = gates[first + 32 * i], up[i] = ups[first + 32 * i];
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
            if (first + 32 * i < num_pieces) to[first + 32 * i] = Unit<Values>(gate[i], up[i]).output(prob);
    }
}

// Compute the gradients of a piece of gate and of up, from that of y. Return the piece's part of the prob's gradient.
template <class Values>
__device__ float gradients_of(const Unit<Values>& unit, const uint4& raw_grad, float prob, uint4& grad_gate, uint4& grad_up) {
    float grad[Values::kCount], of_gate[Values::kCount], of_up[Values::kCount], sum = 0.0f;
    Values::load(raw_grad, grad);
#pragma unroll
    for (int j = 0; j < Values::kCount; ++j) {
        sum = __fadd_rn(sum, __fmul_rn(grad[j], unit.product[j]));
        grad[j] *= prob;
    }
    round_to_dtype<Values>(grad);
#pragma unroll
    for (int j = 0; j < Values::kCount; ++j) of_up[j] = grad[j] * unit.activated[j], of_gate[j] = grad[j] * unit.up[j];
    round_to_dtype<Values>(of_gate);
#pragma unroll
    for (int j = 0; j < Values::kCount; ++j) {
        const float s = sigmoid(unit.gate[j]);
        of_gate[j] = of_gate[j] * s * (1.0f + unit.gate[j] * (1.0f - s));
    }
    grad_gate = Values::store(of_gate), grad_up = Values::store(of_up);
    return sum;
}

template <DType kType>
__global__ void __launch_bounds__(kRowThreads) swiglu_backward(const __grid_constant__ Params p) {
    using Values = Piece<kType>;
    const int64_t row = warp_of_grid();
    if (row >= p.num_rows) return;
    const int num_pieces = static_cast<int>(p.num_columns / Values::kCount), lane = threadIdx.x % 32;
    const bool is_filled = row < num_filled(p);
    const uint4 *gates = pieces(p.inner) + row * 2 * num_pieces, *ups = gates + num_pieces, *grads = pieces(p.grad) + row * num_pieces;
    uint4 *to_gate = pieces(p.grad_inner) + row * 2 * num_pieces, *to_up = to_gate + num_pieces;
    const float prob = p.probs == nullptr || !is_filled ? 1.0f : p.probs[row];
    float sum = 0.0f;
#pragma unroll 1
    for (int first = lane; is_filled && first < num_pieces; first += 32 * kBatch) {
        uint4 gate[kBatch], up[kBatch], grad[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
            if (first + 32 * i < num_pieces) gate[i] = gates[first + 32 * i], up[i] = ups[first + 32 * i], grad[i] = grads[first + 32 * i];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int piece = first + 32 * i;
            if (piece >= num_pieces) continue;
            const Unit<Values> unit(gate[i], up[i]);
            sum += gradients_of(unit, grad[i], prob, to_gate[piece], to_up[piece]);
            if (p.y != nullptr) pieces(p.y)[row * num_pieces + piece] = unit.output(prob);
        }
    }
    if (p.grad_probs == nullptr) return;
#pragma unroll
    for (int step = 16; step >= 1; step /= 2) sum += __shfl_xor_sync(kFullWarp, sum, step);
    if (lane == 0) p.grad_probs[row] = sum;
}

__global__ void __launch_bounds__(kRowThreads) clear_tail(const __grid_constant__ GpuClearTailParams p) {
    const int64_t end = max(0, p.group_ends[p.num_groups - 1]);
    const int64_t num_warps = gridDim.x * (kRowThreads / 32);
#pragma unroll 1
    for (int64_t row = end + warp_of_grid(); row < p.num_rows; row += num_warps) zero_row(p.values + row * p.row_bytes, p.row_bytes);
}

}  // namespace

void launch_swiglu(const GpuSwigluParams& p, void* stream) {
    with_dtype(p.dtype, "fp8 rows are not activated",
               [&](auto dtype) { launch<swiglu<dtype.value>>("swiglu", blocks_of_warps(p.num_rows), kRowThreads, 0, p, stream); });
}

void launch_swiglu_backward(const GpuSwigluParams& p, void* stream) {
    with_dtype(p.dtype, "fp8 rows have no gradient", [&](auto dtype) {
        launch<swiglu_backward<dtype.value>>("swiglu_backward", blocks_of_warps(p.num_rows), kRowThreads, 0, p, stream);
    });
}

void launch_clear_tail(const GpuClearTailParams& p, void* stream) {
    launch<clear_tail>("clear_tail", std::min(blocks_of_warps(p.num_rows), kMaxTailBlocks), kRowThreads, 0, p, stream);
}

}  // namespace deepep_moe

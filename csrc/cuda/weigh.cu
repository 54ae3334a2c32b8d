// Gradients of weighing rows: of y = weight * x, from that of y. A row a warp; each product and sum is rounded to fp32, the row once to its dtype.
#include "cuda/device/launch.cuh"
#include "cuda/device/rows.cuh"
#include "cuda/launch.h"

namespace deepep_moe {
namespace {

constexpr int kThreads = 256;

template <DType kType>
__global__ void __launch_bounds__(kThreads) weigh_backward(const __grid_constant__ GpuWeighParams p) {
    using Values = Piece<kType>;
    const int64_t row = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 32, num_pieces = p.hidden / Values::kCount;
    if (row >= p.num_rows) return;
    const uint4 *grads = pieces(p.grad) + row * num_pieces, *values = pieces(row_of(p.parts, p.x, row, 16 * num_pieces));
    uint4* to = pieces(p.grad_x) + row * num_pieces;
    const float weight = p.weights[row];
    float sum = 0.0f;
#pragma unroll 4
    for (int64_t i = threadIdx.x % 32; i < num_pieces; i += 32) {
        float grad[Values::kCount], x[Values::kCount];
        Values::load(grads[i], grad);
        Values::load(values[i], x);
#pragma unroll
        for (int j = 0; j < Values::kCount; ++j) {
            sum = __fadd_rn(sum, __fmul_rn(grad[j], x[j]));
            grad[j] = __fmul_rn(grad[j], weight);
        }
        to[i] = Values::store(grad);
    }
#pragma unroll
    for (int step = 16; step >= 1; step /= 2) sum += __shfl_xor_sync(kFullWarp, sum, step);
    if (threadIdx.x % 32 == 0) p.grad_weights[row] = sum;
}

}  // namespace

void launch_weigh_backward(const GpuWeighParams& p, void* stream) {
    const int blocks = static_cast<int>(divide_up(p.num_rows, int64_t{kThreads / 32}));
    if (blocks == 0) return;
    switch (p.dtype) {
        case DType::kFloat32: return launch<weigh_backward<DType::kFloat32>>("weigh_backward", blocks, kThreads, 0, p, stream);
        case DType::kBFloat16: return launch<weigh_backward<DType::kBFloat16>>("weigh_backward", blocks, kThreads, 0, p, stream);
        case DType::kFloat16: return launch<weigh_backward<DType::kFloat16>>("weigh_backward", blocks, kThreads, 0, p, stream);
        case DType::kFloat8: throw std::invalid_argument("fp8 rows have no gradient");
    }
}

}  // namespace deepep_moe

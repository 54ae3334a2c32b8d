// Gradients of weighing rows: of y = weight * x, from that of y. A row a warp.
#include "cuda/device/launch.cuh"
#include "cuda/device/rows.cuh"
#include "cuda/launch.h"

namespace deepep_moe {
namespace {

constexpr int kThreads = 256;

template <DType kType>
__global__ void __launch_bounds__(kThreads) weigh_backward(const __grid_constant__ GpuWeighParams p) {
    const int64_t row = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 32;
    if (row < p.num_rows) weigh_row<kType>(p.weighing, p.grad + row * p.row_bytes, p.grad_x + row * p.row_bytes, row, p.row_bytes);
}

}  // namespace

void launch_weigh_backward(const GpuWeighParams& p, void* stream) {
    const int blocks = static_cast<int>(divide_up(p.num_rows, int64_t{kThreads / 32}));
    if (blocks == 0) return;
    with_dtype(p.weighing.dtype, "fp8 rows have no gradient",
               [&](auto dtype) { launch<weigh_backward<dtype.value>>("weigh_backward", blocks, kThreads, 0, p, stream); });
}

}  // namespace deepep_moe

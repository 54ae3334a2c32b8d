// Computes the gradients of y = weight * x, for rows, from that of y, with one warp a row. No block waits for another.
#include "cuda/device/launch.cuh"
#include "cuda/device/rows.cuh"
#include "cuda/launch.h"

namespace deepep_moe {
namespace {

constexpr int kThreads = 256;

template <DType kType>
__global__ void __launch_bounds__(kThreads) scale_rows_backward(const __grid_constant__ GpuScaleRowsParams p) {
    const int64_t row = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 32;
    if (row < p.num_rows) scale_row<kType>(p.scaling, p.grad + row * p.row_bytes, p.grad_x + row * p.row_bytes, row, p.row_bytes);
}

}  // namespace

void launch_scale_rows_backward(const GpuScaleRowsParams& p, void* stream) {
    const int blocks = static_cast<int>(divide_up(p.num_rows, int64_t{kThreads / 32}));
    if (blocks == 0) return;
    with_dtype(p.scaling.dtype, "fp8 rows have no gradient",
               [&](auto dtype) { launch<scale_rows_backward<dtype.value>>("scale_rows_backward", blocks, kThreads, 0, p, stream); });
}

}  // namespace deepep_moe

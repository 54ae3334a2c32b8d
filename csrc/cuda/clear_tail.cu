// Write zeros to the rows that belong to no group. The kernel reads the groups' ends on the device and touches no other row.
#include "cuda/device/launch.cuh"
#include "cuda/device/rows.cuh"
#include "cuda/launch.h"

namespace deepep_moe {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxBlocks = 512;  // a tail is short as a rule

__global__ void __launch_bounds__(kThreads) clear_tail(const __grid_constant__ GpuClearTailParams p) {
    const int64_t end = max(0, p.group_ends[p.num_groups - 1]);
    const int64_t warp = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 32, num_warps = gridDim.x * (kThreads / 32);
#pragma unroll 1
    for (int64_t row = end + warp; row < p.num_rows; row += num_warps) zero_row(p.values + row * p.row_bytes, p.row_bytes);
}

}  // namespace

void launch_clear_tail(const GpuClearTailParams& p, void* stream) {
    const int64_t blocks = divide_up(p.num_rows, int64_t{kThreads / 32});
    if (blocks == 0) return;
    launch<clear_tail>("clear_tail", static_cast<int>(min(blocks, int64_t{kMaxBlocks})), kThreads, 0, p, stream);
}

}  // namespace deepep_moe

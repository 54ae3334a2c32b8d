// Quantizes rows of fp32, bf16 or fp16 to fp8 (e4m3), with one scale for each kScaleBlock columns. The 16 neighbouring threads that share a
// scale have 8 columns each, and find the largest magnitude by shuffles. No block waits for another.
#include "cuda/device/fp8.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/launch.h"

namespace deepep_moe {
namespace {

constexpr int kThreads = 256;
constexpr int kColumns = 8;                               // columns of one thread
constexpr int kThreadsPerBlock = kScaleBlock / kColumns;  // threads that share a scale

template <DType kType>
__global__ void __launch_bounds__(kThreads) quantize(const __grid_constant__ GpuQuantizeParams p) {
    const int64_t num_blocks = divide_up(p.hidden, kScaleBlock),
                  group = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kThreadsPerBlock;
    const int64_t row = group / num_blocks, block = group % num_blocks,
                  column = block * kScaleBlock + threadIdx.x % kThreadsPerBlock * kColumns;
    const bool inside = row < p.num_rows && column < p.hidden;
    float x[kColumns] = {};
    if (inside) load_columns<kType>(p.x + (row * p.hidden + column) * (16 / Piece<kType>::kCount), x);
    const Fp8Block scale(largest_of<kThreadsPerBlock>(x, p.is_rounded ? kFp8LeastTrained : kFp8Least), p.is_rounded);
    if (!inside) return;
    *reinterpret_cast<uint2*>(p.y + row * p.hidden + column) = scale.store(x).raw;
    if (threadIdx.x % kThreadsPerBlock == 0) p.scales[row * num_blocks + block] = scale.scale;
}

}  // namespace

void launch_quantize(const GpuQuantizeParams& p, void* stream) {
    const int64_t threads = p.num_rows * divide_up(p.hidden, kScaleBlock) * kThreadsPerBlock;
    const int blocks = static_cast<int>(divide_up(threads, kThreads));
    if (blocks == 0) return;
    with_dtype(p.dtype, "the rows are fp8 already",
               [&](auto dtype) { launch<quantize<dtype.value>>("quantize", blocks, kThreads, 0, p, stream); });
}

}  // namespace deepep_moe

// Rows of fp32, bf16 or fp16 to fp8 (e4m3) with one fp32 scale for every 128 columns, as DeepSeek-V3 has it (arXiv:2412.19437,
// section 3.3.2): scale = largest magnitude / 448, so that a block uses the whole range of the format.
#include <cuda_fp8.h>

#include "cuda/device/launch.cuh"
#include "cuda/device/rows.cuh"
#include "cuda/launch.h"

namespace deepep_moe {
namespace {

constexpr int kThreads = 256;
constexpr int kColumns = 8;                               // of one thread
constexpr int kThreadsPerBlock = kScaleBlock / kColumns;  // of one scale
constexpr float kLargest = 448.0f, kLeast = 1e-4f;        // of e4m3; of what counts as a magnitude

template <DType kType>
__device__ void load_columns(const std::byte* from, float (&x)[kColumns]) {
    using Values = Piece<kType>;
#pragma unroll
    for (int i = 0; i < kColumns / Values::kCount; ++i) Values::load(pieces(from)[i], x + i * Values::kCount);
}

template <DType kType>
__global__ void __launch_bounds__(kThreads) quantize(const __grid_constant__ GpuQuantizeParams p) {
    const int64_t num_blocks = divide_up(p.hidden, kScaleBlock), group = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kThreadsPerBlock;
    const int64_t row = group / num_blocks, block = group % num_blocks, column = block * kScaleBlock + threadIdx.x % kThreadsPerBlock * kColumns;
    const bool inside = row < p.num_rows && column < p.hidden;
    float x[kColumns] = {};
    if (inside) load_columns<kType>(p.x + (row * p.hidden + column) * (16 / Piece<kType>::kCount), x);
    float largest = kLeast;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) largest = fmaxf(largest, fabsf(x[i]));
    for (int step = 1; step < kThreadsPerBlock; step *= 2) largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, step));
    if (!inside) return;
    const float factor = __fdiv_rn(kLargest, largest);
    __nv_fp8_storage_t y[kColumns];
#pragma unroll
    for (int i = 0; i < kColumns; ++i) y[i] = __nv_cvt_float_to_fp8(__fmul_rn(x[i], factor), __NV_SATFINITE, __NV_E4M3);
    *reinterpret_cast<uint2*>(p.y + row * p.hidden + column) = *reinterpret_cast<const uint2*>(y);
    if (threadIdx.x % kThreadsPerBlock == 0) p.scales[row * num_blocks + block] = __fdiv_rn(largest, kLargest);
}

}  // namespace

void launch_quantize(const GpuQuantizeParams& p, void* stream) {
    const int64_t threads = p.num_rows * divide_up(p.hidden, kScaleBlock) * kThreadsPerBlock;
    const int blocks = static_cast<int>(divide_up(threads, kThreads));
    if (blocks == 0) return;
    switch (p.dtype) {
        case DType::kFloat32: return launch<quantize<DType::kFloat32>>("quantize", blocks, kThreads, 0, p, stream);
        case DType::kBFloat16: return launch<quantize<DType::kBFloat16>>("quantize", blocks, kThreads, 0, p, stream);
        case DType::kFloat16: return launch<quantize<DType::kFloat16>>("quantize", blocks, kThreads, 0, p, stream);
        case DType::kFloat8: throw std::invalid_argument("the rows are fp8 already");
    }
}

}  // namespace deepep_moe

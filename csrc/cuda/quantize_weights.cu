// Matrices of fp32, bf16 or fp16 to fp8 (e4m3), with a power of two as the scale of each kScaleBlock x kScaleBlock block, as they are or
// transposed. A thread block takes one block of a matrix: every thread keeps 8 columns of 8 rows, so that the matrix is read once.
#include "cuda/device/fp8.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/launch.h"

namespace deepep_moe {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kColumns = 8;                      // of one thread, side by side
constexpr int kAcross = kScaleBlock / kColumns;  // threads of a row
constexpr int kRowStep = kThreads / kAcross;     // rows that all threads load at once
constexpr int kRows = kScaleBlock / kRowStep;    // of one thread
constexpr int kTileStride = kScaleBlock + 16;    // bytes; a multiple of 16 that spreads a column over the banks
constexpr int kTileBytes = kScaleBlock * kTileStride;

__device__ __forceinline__ float largest_of_threads(const float (&x)[kRows][kColumns]) {
    __shared__ float of_warps[kWarps];
    float largest = kFp8LeastTrained;
#pragma unroll
    for (int i = 0; i < kRows; ++i) largest = largest_of<32>(x[i], largest);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kWarps; ++i) largest = max_or_nan(largest, of_warps[i]);
    return largest;
}

template <DType kType>
__global__ void __launch_bounds__(kThreads) quantize_weights(const __grid_constant__ GpuQuantizeWeightsParams p) {
    const int64_t across = p.num_columns / kScaleBlock, down = p.num_rows / kScaleBlock;
    const int64_t matrix = blockIdx.x / (across * down), block_row = blockIdx.x / across % down, block_column = blockIdx.x % across;
    const int first_row = threadIdx.x / kAcross, column = threadIdx.x % kAcross * kColumns;
    const int64_t element =
        matrix * p.matrix_stride + (block_row * kScaleBlock + first_row) * p.num_columns + block_column * kScaleBlock + column;
    float x[kRows][kColumns];
#pragma unroll
    for (int i = 0; i < kRows; ++i) load_columns<kType>(p.w + (element + i * kRowStep * p.num_columns) * (16 / Piece<kType>::kCount), x[i]);
    const Fp8Block scale(largest_of_threads(x), true);
    const int64_t row_bytes = p.is_transposed ? p.num_rows : p.num_columns;
    const int64_t top = (p.is_transposed ? block_column : block_row) * kScaleBlock, left = (p.is_transposed ? block_row : block_column);
    std::byte* const y = p.y + (matrix * p.num_rows * p.num_columns + top * row_bytes + left * kScaleBlock);
    if (threadIdx.x == 0) p.scales[matrix * across * down + top / kScaleBlock * (row_bytes / kScaleBlock) + left] = scale.scale;
    if (!p.is_transposed) {
#pragma unroll
        for (int i = 0; i < kRows; ++i)
            *reinterpret_cast<uint2*>(y + (first_row + i * kRowStep) * row_bytes + column) = scale.store(x[i]).raw;
        return;
    }
    auto* const tile = shared_memory<unsigned char>();  // a row for each column of the block
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        const Fp8Columns<kColumns> values = scale.store(x[i]);
#pragma unroll
        for (int j = 0; j < kColumns; ++j) tile[(column + j) * kTileStride + first_row + i * kRowStep] = values.values[j];
    }
    __syncthreads();
    for (int piece = threadIdx.x; piece < kScaleBlock * kScaleBlock / 16; piece += kThreads) {
        const int row = piece / (kScaleBlock / 16), byte = piece % (kScaleBlock / 16) * 16;
        *reinterpret_cast<uint4*>(y + row * row_bytes + byte) = *reinterpret_cast<const uint4*>(tile + row * kTileStride + byte);
    }
}

}  // namespace

void launch_quantize_weights(const GpuQuantizeWeightsParams& p, void* stream) {
    const int blocks = static_cast<int>(p.num_matrices * (p.num_rows / kScaleBlock) * (p.num_columns / kScaleBlock));
    if (blocks == 0) return;
    with_dtype(p.dtype, "the weights are fp8 already", [&](auto dtype) {
        launch<quantize_weights<dtype.value>>("quantize_weights", blocks, kThreads, p.is_transposed ? kTileBytes : 0, p, stream);
    });
}

}  // namespace deepep_moe

// Quantizes fp32, bf16 or fp16 to fp8 (e4m3). No block waits for another.
//
//   quantize            Quantizes rows, with one scale for each kScaleBlock columns. The 16 neighbouring threads that share a scale have 8
//                       columns each, and find the largest magnitude by shuffles.
//
//   quantize_weights    Quantizes matrices, with a power of two as the scale of each kScaleBlock x kScaleBlock block. The output is the
//                       matrix, its transpose, or both. A thread block reads one such block once; every thread has 8 columns of 8 rows. It
//                       transposes them in registers, and shared memory collects the rows of the transposed matrix.
#include "cuda/device/fp8.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/launch.h"

namespace deepep_moe {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kSide = 8;                      // columns, and rows, of one thread
constexpr int kAcross = kScaleBlock / kSide;  // threads side by side in a block of columns
constexpr int kPieces = kScaleBlock / 16;     // pieces of 16 bytes in a row of fp8
constexpr int kTileBytes = kScaleBlock * kScaleBlock;

using Params = GpuQuantizeWeightsParams;

// ---- rows ----

template <DType kType>
__global__ void __launch_bounds__(kThreads) quantize(const __grid_constant__ GpuQuantizeParams p) {
    const int64_t num_blocks = divide_up(p.hidden, kScaleBlock),
                  group = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kAcross;
    const int64_t row = group / num_blocks, block = group % num_blocks, column = block * kScaleBlock + threadIdx.x % kAcross * kSide;
    const bool inside = row < p.num_rows && column < p.hidden;
    float x[kSide] = {};
    if (inside) load_columns<kType>(p.x + (row * p.hidden + column) * (16 / Piece<kType>::kCount), x);
    const Fp8Block scale(largest_of<kAcross>(x, p.is_rounded ? kFp8LeastTrained : kFp8Least), p.is_rounded);
    if (!inside) return;
    *reinterpret_cast<uint2*>(p.y + row * p.hidden + column) = scale.store(x).raw;
    if (threadIdx.x % kAcross == 0) p.scales[row * num_blocks + block] = scale.scale;
}

// ---- matrices ----

// Holds 8 rows of 8 elements as they lie in memory.
template <DType kType>
struct Patch {
    using Values = Piece<kType>;
    static constexpr int kRaw = kSide / Values::kCount;
    uint4 raw[kSide][kRaw];

    __device__ void load(const std::byte* from, int64_t row_pieces) {
#pragma unroll
        for (int i = 0; i < kSide; ++i)
#pragma unroll
            for (int j = 0; j < kRaw; ++j) raw[i][j] = pieces(from)[i * row_pieces + j];
    }
    __device__ void row(int i, float (&x)[kSide]) const {
#pragma unroll
        for (int j = 0; j < kRaw; ++j) Values::load(raw[i][j], x + j * Values::kCount);
    }
};

template <DType kType>
__device__ float largest_of_block(const Patch<kType>& patch) {
    __shared__ float of_warps[kWarps];
    float largest = kFp8LeastTrained;
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
        float x[kSide];
        patch.row(i, x);
#pragma unroll
        for (int j = 0; j < kSide; ++j) largest = max_or_nan(largest, fabsf(x[j]));
    }
    const float mine[1] = {largest};
    largest = largest_of<32>(mine, largest);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kWarps; ++i) largest = max_or_nan(largest, of_warps[i]);
    return largest;
}

// Byte i of word j becomes byte j of word i.
__device__ void transpose_bytes(unsigned& a, unsigned& b, unsigned& c, unsigned& d) {
    const unsigned low_ab = __byte_perm(a, b, 0x5140), low_cd = __byte_perm(c, d, 0x5140);
    const unsigned high_ab = __byte_perm(a, b, 0x7362), high_cd = __byte_perm(c, d, 0x7362);
    a = __byte_perm(low_ab, low_cd, 0x5410), b = __byte_perm(low_ab, low_cd, 0x7632);
    c = __byte_perm(high_ab, high_cd, 0x5410), d = __byte_perm(high_ab, high_cd, 0x7632);
}

// Store rows in pairs: of two neighbouring threads, one stores 16 bytes of the first row, the other 16 bytes of the second.
__device__ void store_rows(const uint2 (&rows)[kSide], std::byte* to, int64_t row_bytes) {
    const bool is_odd = threadIdx.x % 2 == 1;
#pragma unroll
    for (int i = 0; i < kSide; i += 2) {
        const uint2 kept = is_odd ? rows[i + 1] : rows[i], sent = is_odd ? rows[i] : rows[i + 1];
        const unsigned x = __shfl_xor_sync(kFullWarp, sent.x, 1), y = __shfl_xor_sync(kFullWarp, sent.y, 1);
        std::byte* const at = to + (i + is_odd) * row_bytes - (is_odd ? kSide : 0);
        *pieces(at) = is_odd ? make_uint4(x, y, kept.x, kept.y) : make_uint4(kept.x, kept.y, x, y);
    }
}

// Store the thread's part of the transposed block through `tile`: 128 rows of 16 words of 8 bytes. Words are permuted within each row, so
// that neither writes nor reads have bank conflicts.
__device__ void store_transposed(uint2 (&rows)[kSide], uint2* tile, std::byte* to, int64_t row_bytes) {
    transpose_bytes(rows[0].x, rows[1].x, rows[2].x, rows[3].x);
    transpose_bytes(rows[0].y, rows[1].y, rows[2].y, rows[3].y);
    transpose_bytes(rows[4].x, rows[5].x, rows[6].x, rows[7].x);
    transpose_bytes(rows[4].y, rows[5].y, rows[6].y, rows[7].y);
    const int across = threadIdx.x % kAcross, down = threadIdx.x / kAcross;
#pragma unroll
    for (int j = 0; j < kSide / 2; ++j) {
        tile[(across * kSide + j) * kAcross + (down ^ across)] = {rows[j].x, rows[j + 4].x};
        tile[(across * kSide + j + 4) * kAcross + (down ^ across)] = {rows[j].y, rows[j + 4].y};
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kScaleBlock * kPieces / kThreads; ++i) {
        const int row = (threadIdx.x + i * kThreads) / kPieces, piece = threadIdx.x % kPieces, order = row / kSide;
        uint4 value = pieces(tile)[row * kPieces + (piece ^ order / 2)];
        if (order % 2 == 1) value = make_uint4(value.z, value.w, value.x, value.y);
        *pieces(to + row * row_bytes + piece * 16) = value;
    }
}

template <DType kType>
__global__ void __launch_bounds__(kThreads) quantize_weights(const __grid_constant__ Params p) {
    const int64_t across = p.num_columns / kScaleBlock, down = p.num_rows / kScaleBlock;
    const int64_t matrix = blockIdx.x / (across * down), block_row = blockIdx.x / across % down, block_column = blockIdx.x % across;
    const int64_t row = block_row * kScaleBlock + threadIdx.x / kAcross * kSide;
    const int64_t column = block_column * kScaleBlock + threadIdx.x % kAcross * kSide;
    constexpr int kBytes = 16 / Piece<kType>::kCount;
    Patch<kType> patch;
    patch.load(p.w + (matrix * p.matrix_stride + row * p.num_columns + column) * kBytes, p.num_columns * kBytes / 16);
    const Fp8Block scale(largest_of_block(patch), true);
    uint2 rows[kSide];
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
        float x[kSide];
        patch.row(i, x);
        rows[i] = scale.store(x).raw;
    }
    const int64_t first = matrix * p.num_rows * p.num_columns, first_scale = matrix * across * down;
    if (p.y != nullptr) {
        store_rows(rows, p.y + first + row * p.num_columns + column, p.num_columns);
        if (threadIdx.x == 0) p.scales[first_scale + block_row * across + block_column] = scale.scale;
    }
    if (p.y_t != nullptr) {
        store_transposed(rows, shared_memory<uint2>(), p.y_t + first + block_column * kScaleBlock * p.num_rows + block_row * kScaleBlock,
                         p.num_rows);
        if (threadIdx.x == 0) p.scales_t[first_scale + block_column * down + block_row] = scale.scale;
    }
}

}  // namespace

void launch_quantize(const GpuQuantizeParams& p, void* stream) {
    const int64_t threads = p.num_rows * divide_up(p.hidden, kScaleBlock) * kAcross;
    const int blocks = static_cast<int>(divide_up(threads, kThreads));
    with_dtype(p.dtype, "the rows are fp8 already",
               [&](auto dtype) { launch<quantize<dtype.value>>("quantize", blocks, kThreads, 0, p, stream); });
}

void launch_quantize_weights(const GpuQuantizeWeightsParams& p, void* stream) {
    const int blocks = static_cast<int>(p.num_matrices * (p.num_rows / kScaleBlock) * (p.num_columns / kScaleBlock));
    with_dtype(p.dtype, "the weights are fp8 already",
               [&](auto dtype) { launch<quantize_weights<dtype.value>>("quantize_weights", blocks, kThreads, kTileBytes, p, stream); });
}

}  // namespace deepep_moe

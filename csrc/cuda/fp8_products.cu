// Multiplies fp8 rows grouped by expert, and computes the weights' gradients, on Hopper's tensor cores.
//
//   fp8_product<false>   Multiplies rows with the transposed matrix of their expert.
//   fp8_product<true>    For each expert, multiplies the transposed rows of one operand with those of the other.
//
// A block computes one 128 x 256 tile of the result after another, and reads on the device which rows an expert has. One thread loads 128
// bytes of depth at a time, kStages ahead; each of two warp groups has 64 rows of the tile. The tensor cores sum 128 products. The warps
// scale this sum and add it to the accumulator in fp32 (DeepSeek-V3, arXiv:2412.19437, section 3.3.2). While one warp group adds, the
// products of the other run.
#include "cuda/device/launch.cuh"
#include "cuda/device/rows.cuh"
#include "cuda/device/tensor_cores.cuh"
#include "cuda/driver.h"
#include "cuda/launch.h"

namespace deepep_moe {
namespace {

constexpr int kRows = 128, kColumns = 256, kDepth = kTileBytes;  // sizes of a tile
constexpr int kStages = 4;
constexpr int kMathThreads = 256, kThreads = kMathThreads + 128;

using Params = GpuFp8ProductParams;

struct Launch {
    TileMap a, b;
    Params params;
};

struct Shared {
    uint8_t a[kStages][kRows * kDepth], b[kStages][kColumns * kDepth];
    float column_scales[kStages][kColumns];  // for weight gradients only
    uint64_t full[kStages], empty[kStages];
};
constexpr int64_t kSharedBytes = sizeof(Shared) + kTileAlignment;
static_assert(kSharedBytes + kStaticSharedBytes <= 232448, "a block of an H100");

#if DEEPEP_MOE_TENSOR_CORES

constexpr int kHalf = kColumns / 2;  // columns of one accumulator
constexpr int kScaleBlock = 128;

// Walks the tiles of a block, and says at which row and column of the result each begins.
template <bool kOfWeights>
struct Tiles {
    const Params& p;
    int64_t number, first = 0;  // number of the tile, and of the first tile of its group
    int group = -1, start = 0, end = 0, row = 0, column = 0, num_tiles = 0;

    __device__ explicit Tiles(const Params& params) : p(params), number(blockIdx.x) {}

    __device__ bool next() {
        while (group < 0 || number >= first + num_tiles) {
            if (++group == p.num_groups) return false;
            first += num_tiles;
            start = end, end = p.group_ends[group];
            num_tiles = num_tile_rows() * divide_up(kOfWeights ? p.k : p.n, kColumns);
        }
        // Blocks that run at once have different rows and share columns, because the columns' operand is larger.
        const int inner = static_cast<int>(number - first), rows = num_tile_rows();
        row = (kOfWeights ? 0 : start) + inner % rows * kRows, column = inner / rows * kColumns;
        number += gridDim.x;
        return true;
    }

    __device__ int num_tile_rows() const { return divide_up(kOfWeights ? p.n : end - start, kRows); }
    __device__ int num_blocks() const { return kOfWeights ? (end - start) / kDepth : p.k / kDepth; }
};

template <bool kOfWeights>
__device__ void load_tiles(const Launch& launch, Shared& shared) {
    const Params& p = launch.params;
    Tiles<kOfWeights> tiles(p);
    uint32_t step = 0;
    while (tiles.next()) {
        const int num_blocks = tiles.num_blocks(), columns = min(kColumns, p.k - tiles.column);
#pragma unroll 1
        for (int block = 0; block < num_blocks; ++block, ++step) {
            const uint32_t stage = step % kStages, scale_bytes = kOfWeights ? columns * sizeof(float) : 0;
            uint64_t* const full = &shared.full[stage];
            pipe_wait(&shared.empty[stage], step / kStages % 2 ^ 1);
            pipe_expect(full, (kRows + kColumns) * kDepth + scale_bytes);
            const int depth = (kOfWeights ? tiles.start : 0) + block * kDepth;
            load_tile(shared.a[stage], launch.a, depth, tiles.row, full);
            load_tile(shared.b[stage], launch.b, depth, (kOfWeights ? 0 : tiles.group * p.n) + tiles.column, full);
            if (kOfWeights)
                pipe_load(shared.column_scales[stage], p.b_scales + static_cast<int64_t>(depth / kDepth) * p.k + tiles.column, scale_bytes,
                          full);
        }
    }
}

// Holds the scales of this thread's two rows of a tile, and in a product those of its columns.
template <bool kOfWeights>
struct Scales {
    float rows[2], halves[2];

    __device__ Scales(const Params& p, const Tiles<kOfWeights>& tiles, int row, int block) {
        if (kOfWeights) {
            const float* const from = p.a_scales + (static_cast<int64_t>(tiles.start) / kDepth + block) * p.n + tiles.row + row;
            rows[0] = from[0], rows[1] = from[8];
            return;
        }
        const int width = p.k / kScaleBlock;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int64_t of_row = min(static_cast<int64_t>(tiles.row) + row + 8 * i, p.num_rows - 1);
            rows[i] = p.a_scales[of_row * width + block];
            const int column = min(tiles.column + i * kHalf, p.n - 1) / kScaleBlock;
            halves[i] = p.b_scales[(static_cast<int64_t>(tiles.group) * (p.n / kScaleBlock) + column) * width + block];
        }
    }
};

// Returns whether 128 columns share a scale. They do in the output of `rescale_transpose`.
__device__ bool are_equal(const float* column_scales) {
    const float4 four = *reinterpret_cast<const float4*>(column_scales + 4 * (threadIdx.x % 32));
    const float first = *column_scales;
    return __all_sync(kFullWarp, four.x == first && four.y == first && four.z == first && four.w == first) != 0;
}

// Add `part`, times the scales of its two rows, to `sums`.
__device__ void add_scaled(float (&sums)[64], const float (&part)[64], float first, float second) {
#pragma unroll
    for (int i = 0; i < 64; ++i) sums[i] = __fmaf_rn(part[i], i % 4 < 2 ? first : second, sums[i]);
}

// Add `part`, times the scales of its rows and columns, to `sums`.
__device__ void add_scaled(float (&sums)[64], const float (&part)[64], const float (&rows)[2], const float* column_scales) {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
        const float2 columns = *reinterpret_cast<const float2*>(column_scales + 8 * j + 2 * (threadIdx.x % 4));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float& sum = sums[4 * j + i];
            sum = __fmaf_rn(part[4 * j + i], __fmul_rn(rows[i / 2], i % 2 == 0 ? columns.x : columns.y), sum);
        }
    }
}

// Word i of lane q of four neighbors becomes word q of lane i.
__device__ void transpose_words(unsigned (&words)[4]) {
#pragma unroll
    for (int step = 1; step <= 2; step *= 2) {
        const bool is_upper = (threadIdx.x & step) != 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if ((i & step) != 0) continue;
            const unsigned sent = is_upper ? words[i] : words[i + step], got = __shfl_xor_sync(kFullWarp, sent, step);
            (is_upper ? words[i] : words[i + step]) = got;
        }
    }
}

// Store this thread's part of a row, 128 columns from `to` on. Each thread of a quad stores 16 bytes.
__device__ void store_row(const float (&sums)[64], int which, __nv_bfloat16* to, bool is_inside) {
    using Values = Piece<DType::kBFloat16>;
    const int lane = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < 16; j += 4) {
        float x[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = sums[4 * (j + i / 2) + 2 * which + i % 2];
        const uint4 packed = Values::store(x);
        unsigned words[4] = {packed.x, packed.y, packed.z, packed.w};
        transpose_words(words);
        if (is_inside) pieces(to)[j + lane] = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

// Store the row in fp32. Neighbours exchange values, so that a quad stores 16 columns of two 8-column blocks.
__device__ void store_row(const float (&sums)[64], int which, float* to, bool is_inside) {
    const int lane = threadIdx.x % 4;
    const bool is_odd = lane % 2 == 1;
#pragma unroll
    for (int j = 0; j < 16; j += 2) {
        const float *const first = sums + 4 * j + 2 * which, *const second = first + 4;
        const float x = __shfl_xor_sync(kFullWarp, is_odd ? first[0] : second[0], 1);
        const float y = __shfl_xor_sync(kFullWarp, is_odd ? first[1] : second[1], 1);
        const float four[4] = {is_odd ? x : first[0], is_odd ? y : first[1], is_odd ? second[0] : x, is_odd ? second[1] : y};
        if (is_inside) *pieces(to + 8 * (j + lane % 2) + lane / 2 * 4) = Piece<DType::kFloat32>::store(four);
    }
}

template <bool kOfWeights, class Out>
__device__ void store_tile(const Params& p, const Tiles<kOfWeights>& tiles, int row, const float (&sums)[2][64]) {
    const int width = kOfWeights ? p.k : p.n;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int column = tiles.column + half * kHalf;
        if (column >= width) return;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int64_t of_tile = static_cast<int64_t>(tiles.row) + row + 8 * i;
            const bool is_inside = kOfWeights || of_tile < tiles.end;
            const int64_t to = kOfWeights ? static_cast<int64_t>(tiles.group) * p.n + of_tile : of_tile;
            store_row(sums[half], i, static_cast<Out*>(p.out) + to * width + column, is_inside);
        }
    }
}

template <bool kOfWeights, class Out>
__device__ void multiply_tiles(const Params& p, Shared& shared) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = 16 * warp + lane / 4;
    Tiles<kOfWeights> tiles(p);
    uint32_t step = 0;
    while (tiles.next()) {
        const int num_blocks = tiles.num_blocks();
        float sums[2][64] = {};
        if (num_blocks == 0) {
            store_tile<kOfWeights, Out>(p, tiles, row, sums);
            continue;
        }
        Scales<kOfWeights> ahead(p, tiles, row, 0);
#pragma unroll 1
        for (int block = 0; block < num_blocks; ++block, ++step) {
            const uint32_t stage = step % kStages;
            const Scales<kOfWeights> scales = ahead;
            ahead = Scales<kOfWeights>(p, tiles, row, min(block + 1, num_blocks - 1));
            pipe_wait(&shared.full[stage], step / kStages % 2);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float* const column_scales = shared.column_scales[stage] + half * kHalf;
                float part[64];
                begin_products(part, shared.a[stage] + warp / 4 * 64 * kDepth, shared.b[stage] + half * kHalf * kDepth);
                const bool has_one_scale = !kOfWeights || are_equal(column_scales);
                const float scale = kOfWeights ? *column_scales : scales.halves[half];
                end_products(part);
                if (!kOfWeights && half == 1 && lane == 0) pipe_arrive(&shared.empty[stage]);
                if (has_one_scale)
                    add_scaled(sums[half], part, __fmul_rn(scales.rows[0], scale), __fmul_rn(scales.rows[1], scale));
                else
                    add_scaled(sums[half], part, scales.rows, column_scales);
            }
            if (kOfWeights) {
                __syncwarp();  // orders the release below behind all threads' reads of the columns' scales
                if (lane == 0) pipe_arrive(&shared.empty[stage]);
            }
        }
        store_tile<kOfWeights, Out>(p, tiles, row, sums);
    }
}

#endif

template <bool kOfWeights, class Out>
__global__ void __launch_bounds__(kThreads, 1) fp8_product(const __grid_constant__ Launch launch) {
#if DEEPEP_MOE_TENSOR_CORES
    unsigned char* const begin = shared_memory<unsigned char>();
    const auto before = reinterpret_cast<uintptr_t>(begin) % kTileAlignment;
    Shared& shared = *reinterpret_cast<Shared*>(begin + (kTileAlignment - before) % kTileAlignment);
    if (threadIdx.x == 0) {
        prefetch_map(launch.a), prefetch_map(launch.b);
        for (int i = 0; i < kStages; ++i) pipe_init(&shared.full[i], 1), pipe_init(&shared.empty[i], kMathThreads / 32);
        barrier_publish();
    }
    __syncthreads();
    if (threadIdx.x >= kMathThreads) {
        fewer_registers<40>();
        if (threadIdx.x == kMathThreads) load_tiles<kOfWeights>(launch, shared);
    } else {
        more_registers<232>();
        multiply_tiles<kOfWeights, Out>(launch.params, shared);
    }
#endif
}

template <auto kKernel>
void start(const char* name, const Launch& launched, void* stream) {
    const int generation = attribute(cudaDevAttrComputeCapabilityMajor);
    if (generation != 9)
        throw std::runtime_error("the GPU has compute capability " + std::to_string(generation) +
                                 ".x; fp8 products in CUDA need a Hopper GPU");
    launch<kKernel>(name, attribute(cudaDevAttrMultiProcessorCount), kThreads, kSharedBytes, launched, stream);
}

}  // namespace

void launch_fp8_product(const GpuFp8ProductParams& p, void* stream) {
    if (p.num_rows == 0) return;
    const Launch launched{tile_map(p.a, p.num_rows, p.k, kRows), tile_map(p.b, int64_t{p.num_groups} * p.n, p.k, kColumns), p};
    start<fp8_product<false, __nv_bfloat16>>("fp8_product", launched, stream);
}

void launch_fp8_weight_gradient(const GpuFp8ProductParams& p, void* stream) {
    const Launch launched{tile_map(p.a, p.n, p.num_rows, kRows), tile_map(p.b, p.k, p.num_rows, kColumns), p};
    if (p.is_fp32) return start<fp8_product<true, float>>("fp8_weight_gradient", launched, stream);
    start<fp8_product<true, __nv_bfloat16>>("fp8_weight_gradient", launched, stream);
}

}  // namespace deepep_moe

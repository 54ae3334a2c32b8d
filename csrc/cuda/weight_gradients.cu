// Adds gradients of the weights of grouped experts to fp32 sums in memory, on Hopper's tensor cores.
//
//   add_weight_gradients   For each group, multiplies the transposed rows of one operand with those of the other, and adds the product to
//                          the group's matrix.
//
// A pair of blocks computes one 256 x 256 tile of a matrix after another, and reads on the device which rows a group has. A block has 128
// rows of the tile, and each of its two warp groups 64 of them. One thread loads 64 rows of both operands at a time, kStages ahead. Both
// blocks need the same columns of b, so each loads one half for the two. Another warp makes rows zero that are not the group's. Only the
// block that computes an element adds to it, once.
#include "cuda/device/launch.cuh"
#include "cuda/device/rows.cuh"
#include "cuda/device/tensor_cores.cuh"
#include "cuda/driver.h"
#include "cuda/launch.h"

namespace deepep_moe {
namespace {

constexpr int kRows = 128, kColumns = 256, kDepth = 64;  // sizes of a tile
constexpr int kWidth = kTileBytes / 2;                   // columns that one load takes
constexpr int kLoadBytes = kDepth * kTileBytes;
constexpr int kStages = 4;
constexpr int kMathThreads = 256, kThreads = kMathThreads + 128;

using Params = GpuWeightGradientParams;

struct Launch {
    TileMap a, b;
    Params params;
};

struct Stage {
    uint8_t a[kRows / kWidth][kLoadBytes], b[kColumns / kWidth][kLoadBytes];
};

struct Shared {
    Stage stages[kStages];
    uint64_t full[kStages], empty[kStages];
    uint64_t partial[kStages];  // stands for `full` in a step whose rows are not all of the group
};
constexpr int64_t kSharedBytes = sizeof(Shared) + kTileAlignment;
static_assert(kSharedBytes + kStaticSharedBytes <= 232448, "a block of an H100");

#if DEEPEP_MOE_TENSOR_CORES

// Walks the tiles of a block, and says at which row and column of the matrix each begins.
struct Tiles {
    const Params& p;
    int64_t number, first = 0;  // number of the pair's tile, and of the first tile of its group
    int group = -1, start = 0, end = 0, row = 0, column = 0, num_tiles = 0;

    __device__ explicit Tiles(const Params& params) : p(params), number(blockIdx.x / kPair) {}

    __device__ bool next() {
        const int rows = divide_up(p.n, kPair * kRows);
        while (group < 0 || number >= first + num_tiles) {
            if (++group == p.num_groups) return false;
            first += num_tiles;
            start = end, end = p.group_ends[group];
            num_tiles = end <= start ? 0 : rows * divide_up(p.k, kColumns);
        }
        const int inner = static_cast<int>(number - first);
        row = (inner % rows * kPair + static_cast<int>(blockIdx.x) % kPair) * kRows, column = inner / rows * kColumns;
        number += gridDim.x / kPair;
        return true;
    }

    __device__ int num_steps() const { return divide_up(end - start, kDepth); }
    __device__ int last_rows() const { return (end - start - 1) % kDepth + 1; }  // rows of the last of these steps
};

__device__ void load_tiles(const Launch& launch, Shared& shared) {
    constexpr int kLoads = kColumns / kWidth / kPair;
    const int half = static_cast<int>(blockIdx.x) % kPair;
    Tiles tiles(launch.params);
    uint32_t step = 0;
    while (tiles.next()) {
        const int num_steps = tiles.num_steps();
#pragma unroll 1
        for (int i = 0; i < num_steps; ++i, ++step) {
            const uint32_t index = step % kStages;
            Stage& stage = shared.stages[index];
            uint64_t* const full = i == num_steps - 1 && tiles.last_rows() < kDepth ? &shared.partial[index] : &shared.full[index];
            pipe_wait(&shared.empty[index], step / kStages % 2 ^ 1);
            pipe_expect(full, sizeof(Stage));
            const int depth = tiles.start + i * kDepth;
#pragma unroll
            for (int j = 0; j < kRows / kWidth; ++j) load_tile(stage.a[j], launch.a, 2 * (tiles.row + j * kWidth), depth, full);
#pragma unroll
            for (int j = half * kLoads; j < (half + 1) * kLoads; ++j)
                load_tile_to_pair(stage.b[j], launch.b, 2 * (tiles.column + j * kWidth), depth, full);
        }
    }
}

// Zero the rows of a group's last step that are not the group's, before the step is multiplied. One warp calls it.
__device__ void clear_rows(const Params& p, Shared& shared) {
    Tiles tiles(p);
    constexpr int kRowPieces = kTileBytes / 16, kStageLoads = sizeof(Stage) / kLoadBytes;
    uint32_t step = 0, parities = 0;  // bit i: the parity that `partial` of stage i has next
    while (tiles.next()) {
        step += tiles.num_steps();
        const uint32_t index = (step - 1) % kStages;
        if (tiles.last_rows() == kDepth) continue;
        pipe_wait(&shared.partial[index], parities >> index & 1);
        parities ^= 1u << index;
        uint8_t* const loads = shared.stages[index].a[0];
#pragma unroll 1
        for (int i = tiles.last_rows() * kRowPieces + threadIdx.x % 32; i < kDepth * kRowPieces; i += 32)
#pragma unroll
            for (int load = 0; load < kStageLoads; ++load) pieces(loads + load * kLoadBytes)[i] = make_uint4(0, 0, 0, 0);
        fence_bulk_copies_shared();
        __syncwarp();
        if (threadIdx.x % 32 == 0) pipe_arrive(&shared.full[index]);
    }
}

// Add this thread's part of a row of a tile, 256 columns from `to` on of which `num_columns` exist. Neighbours exchange values, so that a
// quad adds to 16 columns of two 8-column blocks at a time.
template <int kWhich>
__device__ void add_row(const float (&sums)[128], float* to, int num_columns) {
    const int lane = threadIdx.x % 4;
    const bool is_odd = lane % 2 == 1;
#pragma unroll
    for (int j = 0; j < 32; j += 2) {
        const float *const first = sums + 4 * j + 2 * kWhich, *const second = first + 4;
        const float x = __shfl_xor_sync(kFullWarp, is_odd ? first[0] : second[0], 1);
        const float y = __shfl_xor_sync(kFullWarp, is_odd ? first[1] : second[1], 1);
        const float four[4] = {is_odd ? x : first[0], is_odd ? y : first[1], is_odd ? second[0] : x, is_odd ? second[1] : y};
        const int column = 8 * (j + lane % 2) + lane / 2 * 4;
        if (column < num_columns) add_to_memory(to + column, four);
    }
}

__device__ void multiply_tiles(const Params& p, Shared& shared) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // Tell both blocks that this warp has read a stage, because each of them loads a part of it for both.
    const auto release = [&](uint32_t step) {
        if (lane < kPair) pipe_arrive_in_pair(&shared.empty[step % kStages], lane);
    };
    Tiles tiles(p);
    uint32_t step = 0;
    while (tiles.next()) {
        const int num_steps = tiles.num_steps();
        float sums[128];
#pragma unroll 1
        for (int i = 0; i < num_steps; ++i, ++step) {
            const uint32_t index = step % kStages;
            const Stage& stage = shared.stages[index];
            pipe_wait(&shared.full[index], step / kStages % 2);
            begin_products(sums, stage.a[warp / 4], stage.b[0], kLoadBytes, i != 0);
            end_products<1>(sums);
            if (i != 0) release(step - 1);
        }
        end_products<0>(sums);
        release(step - 1);
        const int row = tiles.row + 16 * warp + lane / 4;
        float* const to = p.sums + (static_cast<int64_t>(tiles.group) * p.n + row) * p.k + tiles.column;
        add_row<0>(sums, to, row < p.n ? p.k - tiles.column : 0);
        add_row<1>(sums, to + 8 * static_cast<int64_t>(p.k), row + 8 < p.n ? p.k - tiles.column : 0);
    }
}

#endif

__global__ void __launch_bounds__(kThreads, 1) DEEPEP_MOE_PAIRS add_weight_gradients(const __grid_constant__ Launch launch) {
#if DEEPEP_MOE_TENSOR_CORES
    unsigned char* const begin = shared_memory<unsigned char>();
    const auto before = reinterpret_cast<uintptr_t>(begin) % kTileAlignment;
    Shared& shared = *reinterpret_cast<Shared*>(begin + (kTileAlignment - before) % kTileAlignment);
    if (threadIdx.x == 0) {
        prefetch_map(launch.a), prefetch_map(launch.b);
        for (int i = 0; i < kStages; ++i)
            pipe_init(&shared.full[i], 1), pipe_init(&shared.partial[i], 1), pipe_init(&shared.empty[i], kPair * kMathThreads / 32);
        barrier_publish();
    }
    sync_pair();
    if (threadIdx.x >= kMathThreads) {
        fewer_registers<40>();
        if (threadIdx.x == kMathThreads) load_tiles(launch, shared);
        if (threadIdx.x >= kThreads - 32) clear_rows(launch.params, shared);
    } else {
        more_registers<232>();
        multiply_tiles(launch.params, shared);
    }
    sync_pair();  // a block's shared memory must last until the other block has loaded into it and released what it loaded
#else
    __trap();  // compiled from PTX of another kind than the launcher has asked for
#endif
}

}  // namespace

bool launch_add_weight_gradients(const GpuWeightGradientParams& p, void* stream) {
    if (!runs_on_tensor_cores<add_weight_gradients>()) return false;
    if (p.num_rows == 0) return true;
    const int num_pairs = attribute(cudaDevAttrMultiProcessorCount) / kPair;
    const Launch launched{tile_map(p.a, p.num_rows, 2 * p.n, kDepth), tile_map(p.b, p.num_rows, 2 * p.k, kDepth), p};
    launch<add_weight_gradients>("add_weight_gradients", num_pairs * kPair, kThreads, kSharedBytes, launched, stream);
    return true;
}

}  // namespace deepep_moe

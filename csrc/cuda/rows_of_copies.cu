// Moves the rows of copies of experts. In the rows that a rank receives they lie behind those of its own experts, at a place that only the
// GPU knows where the host does not wait for counts. Their products need rows from the begin of a tensor on.
//
//   rows_of_copies    Threads take pieces of kBatch units each, which are 16 bytes, or 4 where rows are no multiple of 16 bytes.
#include <algorithm>

#include "cuda/device/launch.cuh"
#include "cuda/device/sync.cuh"
#include "cuda/launch.h"

namespace deepep_moe {
namespace {

constexpr int kBatch = 4;        // units of a thread in flight
constexpr int kMaxBlocks = 512;  // as a rule there are few rows of copies, or none

template <class Unit>
__global__ void __launch_bounds__(kRowThreads) rows_of_copies(const __grid_constant__ RowsOfCopiesParams p) {
    const int64_t end = min(p.num_rows, static_cast<int64_t>(p.group_ends[p.num_groups - 1]));
    const int64_t begin = min(end, static_cast<int64_t>(p.group_ends[p.num_home - 1])), units = p.row_bytes / sizeof(Unit);
    Unit* const behind = reinterpret_cast<Unit*>(p.rows) + begin * units;
    Unit* const apart = reinterpret_cast<Unit*>(p.of_copies);
    const Unit* const from = p.is_back ? apart : behind;
    Unit* const to = p.is_back ? behind : apart;
    const int64_t num_units = (end - begin) * units, num_threads = int64_t{gridDim.x} * kRowThreads;
#pragma unroll 1
    for (int64_t first = int64_t{blockIdx.x} * kRowThreads + threadIdx.x; first < num_units; first += num_threads * kBatch) {
        Unit unit[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
            if (first + i * num_threads < num_units) unit[i] = from[first + i * num_threads];
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
            if (first + i * num_threads < num_units) to[first + i * num_threads] = unit[i];
    }
}

}  // namespace

void launch_rows_of_copies(const RowsOfCopiesParams& p, void* stream) {
    const int blocks = std::min(blocks_of_warps(p.num_rows), kMaxBlocks);
    const bool has_pieces = (p.row_bytes | reinterpret_cast<uintptr_t>(p.rows) | reinterpret_cast<uintptr_t>(p.of_copies)) % 16 == 0;
    if (has_pieces)
        launch<rows_of_copies<uint4>>("rows_of_copies", blocks, kRowThreads, 0, p, stream);
    else
        launch<rows_of_copies<uint32_t>>("rows_of_copies", blocks, kRowThreads, 0, p, stream);
}

}  // namespace deepep_moe

#pragma once

#include <cstddef>
#include <cstdint>

namespace deepep_moe {

struct GpuClearTailParams {
    int64_t num_rows, row_bytes;  // of values; row_bytes: a multiple of 16
    const int* group_ends;        // [num_groups] on the GPU
    int64_t num_groups;
    std::byte* values;
};

// Writes zeros to the rows from the last of group_ends on, asynchronously on `stream` (a cudaStream_t).
void launch_clear_tail(const GpuClearTailParams& params, void* stream);

}  // namespace deepep_moe

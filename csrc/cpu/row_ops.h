// Copies and sums rows, in the inner loops of dispatch and combine.
#pragma once

#include <cstddef>

#include "common/types.h"

namespace deepep_moe {

// Copy one row. `streaming` writes past the caches; then call `finish_streaming` before another thread may read the row.
void copy_row(void* dst, const void* src, size_t bytes, bool streaming);
void finish_streaming();

struct SumParams {
    void* sum;                // [hidden]
    const void* const* rows;  // num_rows pointers to [hidden], summed in this order
    const float* weights;     // [num_rows], or nullptr: a plain sum
    const void* bias;         // [hidden] added last, or nullptr
    int num_rows, hidden;

    // The rows of the next sum are prefetched meanwhile. They lie anywhere, so the hardware cannot predict them.
    const void* const* next_rows;  // num_next_rows pointers to [hidden]
    int num_next_rows;
};

// Compute sum = round(((0 + w0 * row0) + w1 * row1) + ... + bias). Every product and every sum is rounded to fp32, and the result once to
// the rows' dtype (to nearest even). Not for fp8.
void sum_rows(DType dtype, const SumParams& params);

// Compute the sum of rows of `dtype` without the last rounding: `sum` is fp32.
void sum_rows_to_float32(DType dtype, const SumParams& params);

// Compute the sum of fp32 rows: `sum` and `bias` are of `dtype`.
void sum_float32_rows(DType dtype, const SumParams& params);

}  // namespace deepep_moe

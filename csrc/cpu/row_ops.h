// Copying and summing rows: the inner loops of dispatch and combine.
#pragma once

#include <cstddef>

#include "common/types.h"

namespace deepep_moe {

// Copies one row. `streaming` writes past the caches: for outputs larger than they are. Call `finish_streaming` before another
// thread may read what was written so.
void copy_row(void* dst, const void* src, size_t bytes, bool streaming);
void finish_streaming();

struct SumParams {
    void* sum;                // [hidden]
    const void* const* rows;  // num_rows pointers to [hidden], summed in this order
    const float* weights;     // [num_rows], or nullptr: a plain sum
    const void* bias;         // [hidden] added last, or nullptr
    int num_rows, hidden;

    // Rows of the next sum, fetched into the cache meanwhile: rows lie anywhere, so the hardware cannot guess them.
    const void* const* next_rows;  // num_next_rows pointers to [hidden]
    int num_next_rows;
};

// sum = round(((0 + w0 * row0) + w1 * row1) + ... + bias): every product and every sum rounded to fp32, the result rounded once to
// the rows' dtype (to nearest even). Not for fp8.
void sum_rows(DType dtype, const SumParams& params);

// The same, of rows of `dtype`, without the last rounding: `sum` is fp32.
void sum_rows_to_float32(DType dtype, const SumParams& params);

// The same, of rows that are fp32: `sum` and `bias` are of `dtype`.
void sum_float32_rows(DType dtype, const SumParams& params);

}  // namespace deepep_moe

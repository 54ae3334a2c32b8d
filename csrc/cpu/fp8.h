// Rows of e4m3 with one scale for kScaleBlock columns.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/types.h"

namespace deepep_moe {

// x [hidden] of `dtype` to y [hidden] and scales [hidden / kScaleBlock]; `is_rounded`: scales are powers of two. hidden: a multiple of
// kScaleBlock.
void quantize_row(DType dtype, const void* x, int hidden, bool is_rounded, uint8_t* y, float* scales);

struct Fp8Row {
    const uint8_t* y;     // [hidden]
    const float* scales;  // [hidden / kScaleBlock]
};

// sum [hidden] of `dtype` = round((0 + y0 * scales0) + y1 * scales1 + ...): every product and every sum rounded to fp32.
void sum_fp8_rows(DType dtype, const Fp8Row* rows, int num_rows, int hidden, void* sum);

}  // namespace deepep_moe

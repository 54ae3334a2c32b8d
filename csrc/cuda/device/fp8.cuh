// Converts rows to fp8 (e4m3) and back, with one fp32 scale for every kScaleBlock columns. common/types.h defines the scale.
#pragma once

#include <cuda_fp8.h>

#include <type_traits>

#include "cuda/device/ptx.cuh"
#include "cuda/device/rows.cuh"

namespace deepep_moe {

template <DType kType, int kColumns>
__device__ __forceinline__ void load_columns(const std::byte* from, float (&x)[kColumns]) {
    using Values = Piece<kType>;
#pragma unroll
    for (int i = 0; i < kColumns / Values::kCount; ++i) Values::load(pieces(from)[i], x + i * Values::kCount);
}

// Returns the largest magnitude of the columns that kThreads neighbouring threads hold, or `largest` if that is larger.
template <int kThreads, int kColumns>
__device__ __forceinline__ float largest_of(const float (&x)[kColumns], float largest = kFp8Least) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) largest = max_or_nan(largest, fabsf(x[i]));
#pragma unroll
    for (int step = 1; step < kThreads; step *= 2) largest = max_or_nan(largest, __shfl_xor_sync(kFullWarp, largest, step));
    return largest;
}

// Holds kColumns columns of e4m3, as words and as numbers.
template <int kColumns>
union Fp8Columns {
    using Raw = std::conditional_t<kColumns == 16, uint4, std::conditional_t<kColumns == 8, uint2, unsigned>>;
    Raw raw;
    __nv_fp8_storage_t values[kColumns];
    __nv_fp8x2_storage_t pairs[kColumns / 2];
};

__device__ __forceinline__ float load_fp8(__nv_fp8_storage_t x) { return __half2float(__half(__nv_cvt_fp8_to_halfraw(x, __NV_E4M3))); }

// Add columns of e4m3, times the scale that they share, to `sum`.
template <int kColumns>
__device__ __forceinline__ void add_fp8(float (&sum)[kColumns], const typename Fp8Columns<kColumns>::Raw& raw, float scale) {
    Fp8Columns<kColumns> y;
    y.raw = raw;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) sum[i] = __fadd_rn(sum[i], __fmul_rn(load_fp8(y.values[i]), scale));
}

// Holds the scale of a block of columns, and the factor that quantizes them. With is_rounded the scale is the next power of two.
struct Fp8Block {
    float scale, factor;
    __device__ Fp8Block(float largest, bool is_rounded) {
        scale = __fdiv_rn(largest, kFp8Largest);
        factor = __fdiv_rn(kFp8Largest, largest);
        if (!is_rounded) return;
        const unsigned exponent = rounded_exponent(__float_as_uint(scale));
        scale = __uint_as_float(exponent << 23);
        factor = exponent < kNotFiniteExponent ? __uint_as_float((254 - exponent) << 23) : 0.0f;
    }
    template <int kColumns>
    __device__ Fp8Columns<kColumns> store(const float (&x)[kColumns]) const {
        Fp8Columns<kColumns> y;
#pragma unroll
        for (int i = 0; i < kColumns; i += 2)
            y.pairs[i / 2] =
                __nv_cvt_float2_to_fp8x2(make_float2(__fmul_rn(x[i], factor), __fmul_rn(x[i + 1], factor)), __NV_SATFINITE, __NV_E4M3);
        return y;
    }
};

}  // namespace deepep_moe

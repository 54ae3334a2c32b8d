// The gate's forward and backward share this: loads of logits, score functions, sums over a warp.
#pragma once

#include "common/gate.h"
#include "cuda/device/rows.cuh"

namespace deepep_moe {

constexpr int kQuad = 4;  // neighbouring experts that a thread loads at once

// ---- rows ----

__device__ inline float load_number(const void* from, DType dtype, int64_t at) {
    if (dtype == DType::kBFloat16) return load_bf16(static_cast<const __nv_bfloat16*>(from)[at]);
    if (dtype == DType::kFloat16) return load_fp16(static_cast<const __half*>(from)[at]);
    return static_cast<const float*>(from)[at];
}

__device__ inline void store_number(void* to, DType dtype, int64_t at, float x) {
    if (dtype == DType::kBFloat16)
        static_cast<__nv_bfloat16*>(to)[at] = store_bf16(x);
    else if (dtype == DType::kFloat16)
        static_cast<__half*>(to)[at] = store_fp16(x);
    else
        static_cast<float*>(to)[at] = x;
}

__device__ __forceinline__ void load_half_quad(uint2 raw, bool is_bfloat, float* to) {
    float x[2 * kQuad];
    if (is_bfloat)
        Piece<DType::kBFloat16>::load(make_uint4(raw.x, raw.y, 0, 0), x);
    else
        Piece<DType::kFloat16>::load(make_uint4(raw.x, raw.y, 0, 0), x);
#pragma unroll
    for (int i = 0; i < kQuad; ++i) to[i] = x[i];
}

// Load numbers `at` to `at` + count of `from` as fp32, and 0 behind them. `is_aligned`: one load fetches a quad.
template <int kCount>
__device__ __forceinline__ void load_quads(const void* from, DType dtype, int64_t at, int count, bool is_aligned, float (&to)[kCount]) {
    static_assert(kCount % kQuad == 0);
    if (!is_aligned) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) to[i] = i < count ? load_number(from, dtype, at + i) : 0.0f;
    } else if (dtype == DType::kFloat32) {
        const uint4* quads = pieces(static_cast<const float*>(from) + at);
#pragma unroll
        for (int i = 0; i < kCount; i += kQuad) Piece<DType::kFloat32>::load(i < count ? quads[i / kQuad] : uint4{}, to + i);
    } else {
        const uint2* quads = reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(from) + at);
#pragma unroll
        for (int i = 0; i < kCount; i += kQuad) load_half_quad(i < count ? quads[i / kQuad] : uint2{}, dtype == DType::kBFloat16, to + i);
    }
}

// Zero a row, in pieces of 16 bytes if it is aligned. One warp calls it.
__device__ inline void zero_any_row(void* row, int64_t bytes) {
    if (reinterpret_cast<uintptr_t>(row) % 16 == 0 && bytes % 16 == 0) return zero_row(row, bytes);
#pragma unroll 1
    for (int64_t i = threadIdx.x % 32; i < bytes; i += 32) static_cast<unsigned char*>(row)[i] = 0;
}

__device__ __forceinline__ bool is_finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }

// ---- order: floats as integers in the same order, -0 before 0; no float maps to 0 ----

__device__ __forceinline__ uint32_t ordered(float x) {
    const uint32_t bits = __float_as_uint(x);
    return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
}

// Orders numbers as `ordered` does, with NaN of any sign greater than all others.
__device__ __forceinline__ uint32_t ordered_with_nan(float x) { return x == x ? ordered(x) : ~0u; }

__device__ __forceinline__ float from_ordered(uint32_t key) { return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

// ---- a warp's reductions ----

// Returns the sum over the first `num_lanes` threads, in these. The others must have x = 0.
__device__ __forceinline__ double warp_sum(double x, int num_lanes = 32) {
#pragma unroll
    for (int step = 1; step < 8; step *= 2) x += __shfl_xor_sync(kFullWarp, x, step);
    if (num_lanes > 8) {
#pragma unroll
        for (int step = 8; step < 32; step *= 2) x += __shfl_xor_sync(kFullWarp, x, step);
    }
    return x;
}

__device__ inline float warp_max(float x) { return from_ordered(__reduce_max_sync(kFullWarp, ordered(x))); }

// ---- score functions in double: errors of one or two units in the last place, which rounding to fp32 removes ----

constexpr double kExpBound = 708.0;

// Returns exp(x) for |x| <= kExpBound as 2^n exp(r), with x = n ln2 + r, |r| <= ln2 / 2. The constant ln2 has two parts, and exp(r) is a
// Taylor series of degree 13.
__device__ __forceinline__ double exp_of(double x) {
    constexpr double kLog2E = 1.4426950408889634, kLn2High = 6.93147180369123816490e-01, kLn2Low = 1.90821492927058770002e-10;
    constexpr double kRound = 0x1.8p52;  // adding it leaves the nearest integer in the low bits
    const double shifted = fma(x, kLog2E, kRound);
    const double n = shifted - kRound;
    const double r = fma(-n, kLn2Low, fma(-n, kLn2High, x));
    double p = fma(1.0 / 6227020800.0, r, 1.0 / 479001600.0);
    p = fma(p, r, 1.0 / 39916800.0);
    p = fma(p, r, 1.0 / 3628800.0);
    p = fma(p, r, 1.0 / 362880.0);
    p = fma(p, r, 1.0 / 40320.0);
    p = fma(p, r, 1.0 / 5040.0);
    p = fma(p, r, 1.0 / 720.0);
    p = fma(p, r, 1.0 / 120.0);
    p = fma(p, r, 1.0 / 24.0);
    p = fma(p, r, 1.0 / 6.0);
    p = fma(p, r, 0.5);
    p = fma(p, r, 1.0);
    p = fma(p, r, 1.0);
    return __longlong_as_double(__double_as_longlong(p) + (__double_as_longlong(shifted) << 52));  // 2^n at least 2^-1021
}

// Returns exp(x - largest) for a softmax: the difference is 0 or less, or NaN.
__device__ __forceinline__ double exp_of_shifted(float x, double largest) {
    const double shifted = static_cast<double>(x) - largest;
    return exp_of(shifted < -kExpBound ? -kExpBound : shifted);  // fmax would lose NaN
}

// Returns 1 / x of a normal number by one third-order step. Unlike a division it has no branches.
__device__ __forceinline__ double reciprocal_of(double x) {
    const double guess = approximate_reciprocal(x);
    const double error = fma(-x, guess, 1.0);
    return fma(guess, fma(error, error, error), guess);
}

// Returns 1 / sum, also for an infinite sum.
__device__ __forceinline__ double reciprocal_of_sum(double sum) { return sum == INFINITY ? 0.0 : reciprocal_of(sum); }

constexpr float kSigmoidBound = 128.0f;  // beyond it the result, rounded to fp32, no longer changes

// Returns the sigmoid of x, for |x| <= kExpBound.
__device__ __forceinline__ double sigmoid_of(float x) { return reciprocal_of(1.0 + exp_of(-static_cast<double>(x))); }

__device__ __forceinline__ float bounded(float x) { return x < -kSigmoidBound ? -kSigmoidBound : x > kSigmoidBound ? kSigmoidBound : x; }

__device__ __noinline__ inline double sqrt_softplus_of(float x) {
    return sqrt((x < 0.0f ? 0.0 : static_cast<double>(x)) + log1p(exp_of(fmax(-fabs(static_cast<double>(x)), -kExpBound))));
}

// Returns the derivative of sqrt_softplus_of. For large |x| both the sigmoid and the root vanish, so both use the same bound.
__device__ inline double sqrt_softplus_slope(float x, double root) {
    constexpr float kBound = static_cast<float>(kExpBound);
    return sigmoid_of(fminf(fmaxf(x, -kBound), kBound)) / (2.0 * root);
}

}  // namespace deepep_moe

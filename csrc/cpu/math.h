// Elementary functions written so that compilers vectorize loops over them.
#pragma once

#include <bit>
#include <cstdint>

#include "cpu/clones.h"

namespace deepep_moe {

// exp(x) for |x| <= kExpLimit within one unit in the last place of a double: exp(x) = 2^n exp(r), x = n ln2 + r, |r| <= ln2 / 2,
// with ln2 in two parts (the first has 32 significant bits, so n * kLn2High is exact) and the Taylor series of degree 13, whose
// remainder is below 5e-18.
constexpr double kExpLimit = 708.0;

DEEPEP_MOE_INLINE double exp_bounded(double x) {
    constexpr double kLog2E = 1.4426950408889634, kLn2High = 6.93147180369123816490e-01, kLn2Low = 1.90821492927058770002e-10;
    constexpr double kRound = 0x1.8p52;  // adding it leaves the nearest integer in the low bits
    const double shifted = x * kLog2E + kRound;
    const double n = shifted - kRound;
    const double r = (x - n * kLn2High) - n * kLn2Low;
    double p = 1.0 / 6227020800.0;
    p = p * r + 1.0 / 479001600.0;
    p = p * r + 1.0 / 39916800.0;
    p = p * r + 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    const uint64_t exponent = (std::bit_cast<uint64_t>(shifted) + 1023) << 52;
    return p * std::bit_cast<double>(exponent);
}

template <typename T>
DEEPEP_MOE_INLINE T clamp(T x, T low, T high) {
    x = x < low ? low : x;
    return x > high ? high : x;
}

// 1 / (1 + exp(-x)). Beyond kExpLimit the result no longer changes once it is rounded to fp32 (0 or 1).
DEEPEP_MOE_INLINE double sigmoid(float x) {
    constexpr float kLimit = static_cast<float>(kExpLimit);
    return 1.0 / (1.0 + exp_bounded(-static_cast<double>(clamp(x, -kLimit, kLimit))));
}

}  // namespace deepep_moe

#pragma once

#include <cmath>
#include <cstdint>

#include "cuda_fp16.h"

using __nv_fp8_storage_t = uint8_t;
using __nv_fp8x2_storage_t = uint16_t;
enum __nv_saturation_t { __NV_SATFINITE };
enum __nv_fp8_interpretation_t { __NV_E4M3 };

// Round to nearest even. e4m3 has 4 bits of exponent from -6 to 8 and 3 of mantissa; 448 is the largest.
inline __nv_fp8_storage_t __nv_cvt_float_to_fp8(float x, __nv_saturation_t, __nv_fp8_interpretation_t) {
    if (x != x) return 0x7f;
    const uint8_t sign = std::signbit(x) ? 0x80 : 0;
    const float magnitude = std::min(std::fabs(x), 448.0f);
    int exponent = 0;
    std::frexp(magnitude, &exponent);
    exponent = std::max(exponent - 1, -6);
    int steps = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 3 - exponent)));  // of 1/8 of the power of two
    if (steps == 16) steps = 8, ++exponent;
    return static_cast<uint8_t>(sign | (steps < 8 ? steps : (exponent + 7) << 3 | (steps - 8)));
}

inline __half_raw __nv_cvt_fp8_to_halfraw(__nv_fp8_storage_t x, __nv_fp8_interpretation_t) {
    const int exponent = x >> 3 & 15, mantissa = x & 7;
    const float magnitude = (x & 0x7f) == 0x7f ? NAN
                            : exponent == 0    ? std::ldexp(static_cast<float>(mantissa), -9)
                                               : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
    return __float2half_rn((x & 0x80) != 0 ? -magnitude : magnitude);
}
inline __nv_fp8x2_storage_t __nv_cvt_float2_to_fp8x2(float2 x, __nv_saturation_t saturation, __nv_fp8_interpretation_t format) {
    return static_cast<__nv_fp8x2_storage_t>(__nv_cvt_float_to_fp8(x.x, saturation, format) | __nv_cvt_float_to_fp8(x.y, saturation, format)
                                                                                                  << 8);
}

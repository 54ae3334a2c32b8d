// Floating-point element types and their conversions to and from fp32 (round to nearest, ties to even).
#pragma once

#include <bit>
#include <cstdint>

#include "common/clones.h"

namespace deepep_moe {

enum class DType { kFloat32, kBFloat16, kFloat16 };

struct BFloat16 {
    uint16_t bits;
};

struct Float16 {
    uint16_t bits;
};

DEEPEP_MOE_INLINE float to_float(float x) { return x; }

DEEPEP_MOE_INLINE float to_float(BFloat16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

DEEPEP_MOE_INLINE float to_float(Float16 x) {
    constexpr uint32_t kExponent = 0x7c00u << 13, kRebias = (127u - 15u) << 23;
    const uint32_t magnitude = (x.bits & 0x7fffu) << 13;
    const uint32_t exponent = magnitude & kExponent;
    const uint32_t normal = magnitude + kRebias + (exponent == kExponent ? kRebias : 0u);
    const float subnormal = std::bit_cast<float>(magnitude + kRebias + (1u << 23)) - 0x1p-14f;
    const uint32_t bits = exponent == 0 ? std::bit_cast<uint32_t>(subnormal) : normal;
    return std::bit_cast<float>(bits | ((x.bits & 0x8000u) << 16));
}

template <typename T>
T from_float(float x);

template <>
DEEPEP_MOE_INLINE float from_float<float>(float x) {
    return x;
}

template <>
DEEPEP_MOE_INLINE BFloat16 from_float<BFloat16>(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return {static_cast<uint16_t>(x != x ? 0x7fc0u : rounded)};
}

template <>
DEEPEP_MOE_INLINE Float16 from_float<Float16>(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x), magnitude = bits & 0x7fffffffu;
    uint32_t half;
    if (magnitude >= 0x47800000u) {  // 65536 and more
        half = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    } else if (magnitude < 0x38800000u) {  // below 2^-14: a subnormal; one unit in the last place of 0.5 is its step
        half = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
    } else {
        half = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
    }
    return {static_cast<uint16_t>(half | ((bits >> 16) & 0x8000u))};
}

}  // namespace deepep_moe

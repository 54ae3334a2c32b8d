// Defines how floating-point elements are stored, and how they convert to and from fp32 (to nearest even). Half precision is done in
// integer arithmetic, so that loops vectorize without half-precision instructions.
#pragma once

#include <bit>
#include <cstdint>

// DEEPEP_MOE_CLONES: compile the function for several x86-64 levels and pick one when the library is loaded (GCC's target_clones;
// needs the C library's ifunc, which asks before the thread sanitizer has begun). Floating-point contraction is off in the build, so every
// clone computes the same bits.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12 && \
    !defined(__SANITIZE_THREAD__)
#define DEEPEP_MOE_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define DEEPEP_MOE_CLONES
#endif

// DEEPEP_MOE_INLINE: a helper of such a function; only what is inlined into a clone is compiled for the clone's level.
#define DEEPEP_MOE_INLINE inline __attribute__((always_inline))

namespace deepep_moe {

struct Float32 {
    using Storage = float;
    static DEEPEP_MOE_INLINE float load(float x) { return x; }
    static DEEPEP_MOE_INLINE float store(float x) { return x; }
};

struct BFloat16 {
    using Storage = uint16_t;
    static DEEPEP_MOE_INLINE float load(uint16_t x) { return std::bit_cast<float>(uint32_t{x} << 16); }
    static DEEPEP_MOE_INLINE uint16_t store(float x) {
        const uint32_t bits = std::bit_cast<uint32_t>(x);
        const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        return static_cast<uint16_t>(x == x ? rounded : 0x7fc0u);
    }
};

struct Float16 {
    using Storage = uint16_t;
    static DEEPEP_MOE_INLINE float load(uint16_t x) {
        constexpr uint32_t kExponent = 0x7c00u << 13, kRebias = (127u - 15u) << 23;
        const uint32_t magnitude = (x & 0x7fffu) << 13, sign = (x & 0x8000u) << 16;
        const uint32_t exponent = magnitude & kExponent;
        const uint32_t normal = magnitude + kRebias + (exponent == kExponent ? kRebias : 0u);
        const float subnormal = std::bit_cast<float>(magnitude + kRebias + (1u << 23)) - 0x1p-14f;
        return std::bit_cast<float>((exponent == 0 ? std::bit_cast<uint32_t>(subnormal) : normal) | sign);
    }
    static DEEPEP_MOE_INLINE uint16_t store(float x) {
        const uint32_t bits = std::bit_cast<uint32_t>(x), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
        const uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
        // The last place of 0.5 is the step of the subnormal halves.
        const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
        uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
        half = magnitude >= 0x47800000u ? 0x7c00u : half;  // 65536 and more; from 65520 on the rounding above carries into infinity
        half = magnitude > 0x7f800000u ? 0x7e00u : half;   // NaN
        return static_cast<uint16_t>(half | sign);
    }
};

}  // namespace deepep_moe

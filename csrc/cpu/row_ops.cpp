#include "cpu/row_ops.h"

#include <bit>
#include <cstdint>
#include <cstring>
#include <stdexcept>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

// One build, the widest vectors of the machine it runs on.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__)
#define DEEPEP_MOE_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define DEEPEP_MOE_CLONES
#endif
#define DEEPEP_MOE_INLINE inline __attribute__((always_inline))

namespace deepep_moe {
namespace {

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
        const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        return static_cast<uint16_t>(x == x ? rounded : 0x7fc0u);
    }
};

// IEEE half in integer arithmetic, so that it vectorizes without half-precision instructions.
struct Float16 {
    using Storage = uint16_t;
    static DEEPEP_MOE_INLINE float load(uint16_t x) {
        const uint32_t magnitude = uint32_t{x} & 0x7fff, sign = (uint32_t{x} & 0x8000) << 16;
        // Exponents differ by 112; the product makes subnormal halves right as well. All ones mean inf or NaN in both formats.
        const float scaled = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
        const uint32_t special = (magnitude << 13) | 0x7f800000u;
        return std::bit_cast<float>((magnitude >= 0x7c00 ? special : std::bit_cast<uint32_t>(scaled)) | sign);
    }
    static DEEPEP_MOE_INLINE uint16_t store(float x) {
        const uint32_t bits = std::bit_cast<uint32_t>(x), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
        const uint32_t normal = (magnitude + 0xfff + ((magnitude >> 13) & 1) - (112u << 23)) >> 13;
        // Adding 0.5 leaves ten fraction bits of weight 2^-24, the subnormal halves, rounded to nearest even by the addition.
        const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
        uint32_t half = magnitude < (113u << 23) ? subnormal : normal;
        half = magnitude >= 0x477ff000u ? 0x7c00u : half;  // rounds to 65536 or more
        half = magnitude > 0x7f800000u ? 0x7e00u : half;   // NaN
        return static_cast<uint16_t>(half | sign);
    }
};

constexpr int kBlock = 64;  // columns whose sums stay in registers

template <class T>
DEEPEP_MOE_INLINE void sum_block(const SumParams& p, int begin, int columns) {
    using Storage = typename T::Storage;
    float sum[kBlock] = {};
    for (int i = 0; i < p.num_rows; ++i) {
        const Storage* row = static_cast<const Storage*>(p.rows[i]) + begin;
        if (p.weights != nullptr) {
            const float weight = p.weights[i];
            for (int j = 0; j < columns; ++j) sum[j] += weight * T::load(row[j]);
        } else {
            for (int j = 0; j < columns; ++j) sum[j] += T::load(row[j]);
        }
    }
    if (p.bias != nullptr) {
        const Storage* bias = static_cast<const Storage*>(p.bias) + begin;
        for (int j = 0; j < columns; ++j) sum[j] += T::load(bias[j]);
    }
    Storage* out = static_cast<Storage*>(p.sum) + begin;
    for (int j = 0; j < columns; ++j) out[j] = T::store(sum[j]);
}

template <class T>
DEEPEP_MOE_INLINE void sum_all(const SumParams& p) {
    int begin = 0;
    for (; begin + kBlock <= p.hidden; begin += kBlock) sum_block<T>(p, begin, kBlock);
    if (begin < p.hidden) sum_block<T>(p, begin, p.hidden - begin);
}

DEEPEP_MOE_CLONES void sum_rows_float32(const SumParams& p) { sum_all<Float32>(p); }
DEEPEP_MOE_CLONES void sum_rows_bfloat16(const SumParams& p) { sum_all<BFloat16>(p); }
DEEPEP_MOE_CLONES void sum_rows_float16(const SumParams& p) { sum_all<Float16>(p); }

}  // namespace

void copy_row(void* dst, const void* src, size_t bytes, bool streaming) {
#if defined(__SSE2__)
    if (streaming && reinterpret_cast<uintptr_t>(dst) % 16 == 0) {
        auto* out = static_cast<__m128i*>(dst);
        const auto* in = static_cast<const __m128i*>(src);
        const size_t count = bytes / sizeof(__m128i);
        for (size_t i = 0; i < count; ++i) _mm_stream_si128(out + i, _mm_loadu_si128(in + i));
        return;
    }
#endif
    (void)streaming;
    std::memcpy(dst, src, bytes);
}

void finish_streaming() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

void sum_rows(DType dtype, const SumParams& params) {
    switch (dtype) {
        case DType::kFloat32: return sum_rows_float32(params);
        case DType::kBFloat16: return sum_rows_bfloat16(params);
        case DType::kFloat16: return sum_rows_float16(params);
        case DType::kFloat8: throw std::invalid_argument("fp8 rows cannot be summed; combine takes fp32, bf16 or fp16");
    }
}

}  // namespace deepep_moe

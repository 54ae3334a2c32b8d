// Defines element types and bounds of sizes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <type_traits>

// Marks functions that both CPUs and GPUs call.
#if defined(__CUDACC__)
#define DEEPEP_MOE_HD __host__ __device__
#else
#define DEEPEP_MOE_HD
#endif

namespace deepep_moe {

constexpr int kMaxRanks = 64;
constexpr int kMaxTopk = 32;
constexpr int kScaleBlock = 128;                          // columns of an fp8 row that share one fp32 scale
constexpr float kFp8Largest = 448.0f, kFp8Least = 1e-4f;  // largest e4m3 value; a block's largest magnitude counts as at least kFp8Least
constexpr float kFp8LeastTrained = 0x1p-100f;             // the same for blocks whose gradients may be small; their scale is normal
constexpr int kRowAlignment = 16;                         // bytes; a row's size must be a multiple of it
constexpr int kMaxReasonBytes = 240;                      // bytes of the reason that peers get for a refusal

enum class DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kFloat8 = 3, kFloat8E5M2 = 4 };  // kFloat8: e4m3
enum class Layout : int { kRank = 0, kExpert = 1 };

constexpr size_t element_bytes(DType dtype) {
    switch (dtype) {
        case DType::kFloat32: return 4;
        case DType::kBFloat16:
        case DType::kFloat16: return 2;
        case DType::kFloat8:
        case DType::kFloat8E5M2: return 1;
    }
    return 0;
}

constexpr const char* name_of(DType dtype) {
    switch (dtype) {
        case DType::kFloat32: return "float32";
        case DType::kBFloat16: return "bfloat16";
        case DType::kFloat16: return "float16";
        case DType::kFloat8: return "float8_e4m3fn";
        case DType::kFloat8E5M2: return "float8_e5m2";
    }
    return "?";
}

// Call `launcher` with the type as a constant, `dtype.value`. For fp8 throw std::invalid_argument with why_not_fp8.
template <class Launcher>
void with_dtype(DType dtype, const char* why_not_fp8, const Launcher& launcher) {
    switch (dtype) {
        case DType::kFloat32: return launcher(std::integral_constant<DType, DType::kFloat32>{});
        case DType::kBFloat16: return launcher(std::integral_constant<DType, DType::kBFloat16>{});
        case DType::kFloat16: return launcher(std::integral_constant<DType, DType::kFloat16>{});
        case DType::kFloat8:
        case DType::kFloat8E5M2: throw std::invalid_argument(why_not_fp8);
    }
}

constexpr const char* name_of(Layout layout) { return layout == Layout::kRank ? "rank" : "expert"; }

constexpr size_t align_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// The scale of a block of an fp8 row with largest magnitude m is m / kFp8Largest, as in DeepSeek-V3 (arXiv:2412.19437, section 3.3.2). So a
// block uses the whole range of the format. A rounded scale is the next power of two, 2 to this biased exponent. If a block has inf or NaN,
// its scale has that too, and the exponent is 255, which is the format's NaN.
constexpr uint32_t kNotFiniteExponent = 255;
DEEPEP_MOE_HD constexpr uint32_t rounded_exponent(uint32_t scale_bits) {
    const uint32_t exponent = (scale_bits + 0x7fffffu) >> 23;
    return exponent < kNotFiniteExponent ? exponent : kNotFiniteExponent;
}

// The tokens of a channel are [begin, end).
struct Range {
    int64_t begin, end;
};
constexpr Range channel_range(int64_t num_tokens, int channel, int num_channels) {
    return {num_tokens * channel / num_channels, num_tokens * (channel + 1) / num_channels};
}

}  // namespace deepep_moe

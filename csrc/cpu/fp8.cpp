#include "cpu/fp8.h"

#include <algorithm>
#include <bit>
#include <stdexcept>

#include "cpu/elements.h"
#include "common/low_latency.h"

namespace deepep_moe {
namespace {

template <class T>
DEEPEP_MOE_INLINE void quantize_block(const typename T::Storage* x, bool is_rounded, uint8_t* y, float* scale) {
    float values[kScaleBlock];
    uint32_t largest_bits = std::bit_cast<uint32_t>(kFp8Least);  // of magnitudes, which compare as their bits do; NaN is above all
    for (int j = 0; j < kScaleBlock; ++j) {
        values[j] = T::load(x[j]);
        largest_bits = std::max(largest_bits, std::bit_cast<uint32_t>(values[j]) & 0x7fffffffu);
    }
    const float largest = std::bit_cast<float>(largest_bits);
    *scale = largest / kFp8Largest;
    if (is_rounded) *scale = std::bit_cast<float>(rounded_exponent(std::bit_cast<uint32_t>(*scale)) << 23);
    const float factor = is_rounded ? 1.0f / *scale : kFp8Largest / largest;
    for (int j = 0; j < kScaleBlock; ++j) {
        float value = values[j] * factor;
        value = value < -kFp8Largest ? -kFp8Largest : value;
        y[j] = Float8::store(value > kFp8Largest ? kFp8Largest : value);
    }
}

template <class T>
DEEPEP_MOE_INLINE void quantize_blocks(const void* x, int hidden, bool is_rounded, uint8_t* y, float* scales) {
    const auto* row = static_cast<const typename T::Storage*>(x);
    for (int begin = 0; begin < hidden; begin += kScaleBlock) quantize_block<T>(row + begin, is_rounded, y + begin, scales++);
}

DEEPEP_MOE_CLONES void quantize_float32(const void* x, int hidden, bool is_rounded, uint8_t* y, float* scales) {
    quantize_blocks<Float32>(x, hidden, is_rounded, y, scales);
}
DEEPEP_MOE_CLONES void quantize_bfloat16(const void* x, int hidden, bool is_rounded, uint8_t* y, float* scales) {
    quantize_blocks<BFloat16>(x, hidden, is_rounded, y, scales);
}
DEEPEP_MOE_CLONES void quantize_float16(const void* x, int hidden, bool is_rounded, uint8_t* y, float* scales) {
    quantize_blocks<Float16>(x, hidden, is_rounded, y, scales);
}

template <class T>
DEEPEP_MOE_INLINE void sum_blocks(const Fp8Row* rows, int num_rows, int hidden, void* sum) {
    auto* out = static_cast<typename T::Storage*>(sum);
    for (int block = 0; block < hidden / kScaleBlock; ++block, out += kScaleBlock) {
        float total[kScaleBlock] = {};
        for (int i = 0; i < num_rows; ++i) {
            const uint8_t* y = rows[i].y + block * kScaleBlock;
            const float scale = rows[i].scales[block];
            for (int j = 0; j < kScaleBlock; ++j) total[j] += Float8::load(y[j]) * scale;
        }
        for (int j = 0; j < kScaleBlock; ++j) out[j] = T::store(total[j]);
    }
}

DEEPEP_MOE_CLONES void sum_to_float32(const Fp8Row* rows, int num_rows, int hidden, void* sum) {
    sum_blocks<Float32>(rows, num_rows, hidden, sum);
}
DEEPEP_MOE_CLONES void sum_to_bfloat16(const Fp8Row* rows, int num_rows, int hidden, void* sum) {
    sum_blocks<BFloat16>(rows, num_rows, hidden, sum);
}
DEEPEP_MOE_CLONES void sum_to_float16(const Fp8Row* rows, int num_rows, int hidden, void* sum) {
    sum_blocks<Float16>(rows, num_rows, hidden, sum);
}

}  // namespace

void quantize_row(DType dtype, const void* x, int hidden, bool is_rounded, uint8_t* y, float* scales) {
    switch (dtype) {
        case DType::kFloat32: return quantize_float32(x, hidden, is_rounded, y, scales);
        case DType::kBFloat16: return quantize_bfloat16(x, hidden, is_rounded, y, scales);
        case DType::kFloat16: return quantize_float16(x, hidden, is_rounded, y, scales);
        case DType::kFloat8:
        case DType::kFloat8E5M2: throw std::invalid_argument("rows are fp8 already");
    }
}

void sum_fp8_rows(DType dtype, const Fp8Row* rows, int num_rows, int hidden, void* sum) {
    switch (dtype) {
        case DType::kFloat32: return sum_to_float32(rows, num_rows, hidden, sum);
        case DType::kBFloat16: return sum_to_bfloat16(rows, num_rows, hidden, sum);
        case DType::kFloat16: return sum_to_float16(rows, num_rows, hidden, sum);
        case DType::kFloat8:
        case DType::kFloat8E5M2: throw std::invalid_argument("a sum of fp8 rows is fp32, bf16 or fp16");
    }
}

}  // namespace deepep_moe

#include "cpu/row_ops.h"

#include <cstdint>
#include <cstring>

#include "cpu/elements.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace deepep_moe {
namespace {

constexpr int kBlock = 64;  // columns whose sums stay in registers

template <class T, class Sum, class Bias>
DEEPEP_MOE_INLINE void sum_block(const SumParams& p, int begin, int columns) {
    using Storage = typename T::Storage;
    for (int i = 0; i < p.num_next_rows; ++i) {
        const char* next = static_cast<const char*>(p.next_rows[i]) + begin * sizeof(Storage);
        for (size_t byte = 0; byte < columns * sizeof(Storage); byte += 64) __builtin_prefetch(next + byte);
    }
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
        const auto* bias = static_cast<const typename Bias::Storage*>(p.bias) + begin;
        for (int j = 0; j < columns; ++j) sum[j] += Bias::load(bias[j]);
    }
    auto* out = static_cast<typename Sum::Storage*>(p.sum) + begin;
    for (int j = 0; j < columns; ++j) out[j] = Sum::store(sum[j]);
}

template <class T, class Sum = T, class Bias = T>
DEEPEP_MOE_INLINE void sum_all(const SumParams& p) {
    int begin = 0;
    for (; begin + kBlock <= p.hidden; begin += kBlock) sum_block<T, Sum, Bias>(p, begin, kBlock);
    if (begin < p.hidden) sum_block<T, Sum, Bias>(p, begin, p.hidden - begin);
}

DEEPEP_MOE_CLONES void sum_rows_float32(const SumParams& p) { sum_all<Float32>(p); }
DEEPEP_MOE_CLONES void sum_rows_bfloat16(const SumParams& p) { sum_all<BFloat16>(p); }
DEEPEP_MOE_CLONES void sum_rows_float16(const SumParams& p) { sum_all<Float16>(p); }
DEEPEP_MOE_CLONES void sum_rows_bfloat16_to_float32(const SumParams& p) { sum_all<BFloat16, Float32>(p); }
DEEPEP_MOE_CLONES void sum_rows_float16_to_float32(const SumParams& p) { sum_all<Float16, Float32>(p); }
DEEPEP_MOE_CLONES void sum_float32_rows_to_bfloat16(const SumParams& p) { sum_all<Float32, BFloat16, BFloat16>(p); }
DEEPEP_MOE_CLONES void sum_float32_rows_to_float16(const SumParams& p) { sum_all<Float32, Float16, Float16>(p); }

// Sums by the function for the dtype: of float32, bfloat16, float16.
void sum_by(void (*const (&functions)[3])(const SumParams&), DType dtype, const SumParams& params) {
    with_dtype(dtype, "fp8 rows cannot be summed; combine takes fp32, bf16 or fp16",
               [&](auto type) { functions[static_cast<int>(type.value)](params); });
}

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

void sum_rows(DType dtype, const SumParams& params) { sum_by({sum_rows_float32, sum_rows_bfloat16, sum_rows_float16}, dtype, params); }

void sum_rows_to_float32(DType dtype, const SumParams& params) {
    sum_by({sum_rows_float32, sum_rows_bfloat16_to_float32, sum_rows_float16_to_float32}, dtype, params);
}

void sum_float32_rows(DType dtype, const SumParams& params) {
    sum_by({sum_rows_float32, sum_float32_rows_to_bfloat16, sum_float32_rows_to_float16}, dtype, params);
}

}  // namespace deepep_moe

// What the gate's forward and backward share: bounds, rows of logits, score functions.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>

#include "cpu/elements.h"
#include "cpu/math.h"
#include "cpu/gate.h"

namespace deepep_moe {

constexpr int64_t kMinTokensPerThread = 64;

// Floats as integers in the same order, -0 equal to 0: reductions over integers vectorize.
DEEPEP_MOE_INLINE int32_t ordered_bits(float value) {
    const int32_t bits = std::bit_cast<int32_t>(value + 0.0f);
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

DEEPEP_MOE_INLINE float from_ordered_bits(int32_t key) { return std::bit_cast<float>(key ^ ((key >> 31) & 0x7fffffff)); }

template <class T>
DEEPEP_MOE_INLINE const float* load_row(const void* __restrict in, int64_t offset, int n, float* __restrict out) {
    for (int i = 0; i < n; ++i) out[i] = T::load(static_cast<const typename T::Storage*>(in)[offset + i]);
    return out;
}

// The token's logits as fp32: in place where they are fp32, otherwise converted into `buffer`.
DEEPEP_MOE_INLINE const float* logits_row(const void* logits, DType dtype, int64_t token, int n, float* buffer) {
    switch (dtype) {
        case DType::kBFloat16: return load_row<BFloat16>(logits, token * n, n, buffer);
        case DType::kFloat16: return load_row<Float16>(logits, token * n, n, buffer);
        default: return static_cast<const float*>(logits) + token * n;
    }
}

// sqrt(log(1 + exp(x))). Below -kExpLimit the result no longer changes once it is rounded to fp32 (0).
DEEPEP_MOE_INLINE double sqrt_softplus(float x) {
    const double magnitude = std::min<double>(std::fabs(x), kExpLimit);
    return std::sqrt(std::max<double>(x, 0.0) + std::log1p(exp_bounded(-magnitude)));
}

// d sqrt(log(1 + exp(x))) / dx, from that root.
DEEPEP_MOE_INLINE double sqrt_softplus_slope(float x, double root) { return sigmoid(x) / (2.0 * root); }

// Sum of term(i) for i < n, over kLanes interleaved partial sums, so that it vectorizes in a fixed order.
template <class Term>
DEEPEP_MOE_INLINE double sum_of(int n, const Term& term) {
    constexpr int kLanes = 8;
    double partial[kLanes] = {};
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        for (int lane = 0; lane < kLanes; ++lane) partial[lane] += term(i + lane);
    }
    double sum = 0.0;
    for (int lane = 0; lane < kLanes; ++lane) sum += partial[lane];
    for (; i < n; ++i) sum += term(i);
    return sum;
}

// Softmax of a row in double.
DEEPEP_MOE_INLINE void softmax_row(const float* __restrict logits, double* __restrict probs, int n) {
    int32_t largest_bits = ordered_bits(logits[0]);
    for (int i = 1; i < n; ++i) largest_bits = std::max(largest_bits, ordered_bits(logits[i]));
    const double largest = from_ordered_bits(largest_bits);
    for (int i = 0; i < n; ++i) {
        const double shifted = logits[i] - largest;
        probs[i] = exp_bounded(shifted < -kExpLimit ? -kExpLimit : shifted);
    }
    const double sum = sum_of(n, [&](int i) { return probs[i]; });
    for (int i = 0; i < n; ++i) probs[i] /= sum;
}

// Softmax over the lanes of one token, in lane order.
DEEPEP_MOE_INLINE void softmax_lanes(const float* logits, double* probs, int num_topk) {
    float largest = logits[0];
    for (int k = 1; k < num_topk; ++k) largest = logits[k] > largest ? logits[k] : largest;
    double sum = 0.0;
    for (int k = 0; k < num_topk; ++k) {
        const double shifted = static_cast<double>(logits[k]) - largest;
        probs[k] = exp_bounded(shifted < -kExpLimit ? -kExpLimit : shifted);
        sum += probs[k];
    }
    for (int k = 0; k < num_topk; ++k) probs[k] /= sum;
}

DEEPEP_MOE_INLINE int64_t load_index(const void* topk_idx, bool index64, int64_t position) {
    return index64 ? static_cast<const int64_t*>(topk_idx)[position] : static_cast<const int32_t*>(topk_idx)[position];
}

DEEPEP_MOE_INLINE void store_index(void* topk_idx, bool index64, int64_t position, int expert) {
    if (index64) {
        static_cast<int64_t*>(topk_idx)[position] = expert;
    } else {
        static_cast<int32_t*>(topk_idx)[position] = expert;
    }
}

}  // namespace deepep_moe

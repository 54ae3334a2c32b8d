// One warp works on a row: each thread handles 16 bytes at a time, with several loads in flight.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/device/sync.cuh"

namespace deepep_moe {

constexpr int kRowsInFlight = 4;  // rows in flight in a sum
constexpr int kInFlight = 7;      // 16-byte loads a thread issues before it uses the first; a bf16 row of 7168 columns is 4 such batches

// Returns the position of the n-th set bit (from 0), or 0 if there are fewer.
__device__ __forceinline__ int nth_set(unsigned bits, int n) {
#pragma unroll 1
    for (int i = 0; i < n; ++i) bits &= bits - 1;
    return bits != 0 ? __ffs(bits) - 1 : 0;
}

// Walks the 16-byte pieces of a row in batches: it calls load(piece) for all of a batch, then use(piece, value).
template <class Load, class Use>
__device__ __forceinline__ void for_pieces(int64_t num_pieces, Load load, Use use) {
    const int lane = threadIdx.x % 32;
    for (int64_t first = lane; first < num_pieces; first += 32 * kInFlight) {
        decltype(load(int64_t{0})) values[kInFlight];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i)
            if (first + 32 * i < num_pieces) values[i] = load(first + 32 * i);
#pragma unroll
        for (int i = 0; i < kInFlight; ++i)
            if (first + 32 * i < num_pieces) use(first + 32 * i, values[i]);
    }
}

__device__ __forceinline__ const uint4* pieces(const void* row) { return static_cast<const uint4*>(row); }
__device__ __forceinline__ uint4* pieces(void* row) { return static_cast<uint4*>(row); }

__device__ __forceinline__ void copy_row(void* dst, const void* src, int64_t bytes) {
    for_pieces(bytes / 16, [&](int64_t i) { return pieces(src)[i]; }, [&](int64_t i, uint4 value) { pieces(dst)[i] = value; });
}

__device__ __forceinline__ void zero_row(void* dst, int64_t bytes) {
#pragma unroll 1
    for (int64_t i = threadIdx.x % 32; i < bytes / 16; i += 32) pieces(dst)[i] = make_uint4(0, 0, 0, 0);
}

// Sum pieces of several rows, in order. Row i is rows(i), or `held` if that is null, weighted by weights(i), for 0 <= i < num_rows. Loads
// of kBatch pieces, 32 apart from `first` on, of kRowsInFlight rows are in flight at once. kFused: a product is not rounded before it is
// added. All threads of a warp must call it.
template <class Values, int kBatch, bool kFused = false, class Rows, class Weights>
__device__ __forceinline__ void sum_pieces(float (&sum)[kBatch][Values::kCount], int first, int end, int num_rows, const Rows& rows,
                                           const Weights& weights, const uint4 (&held)[kBatch]) {
#pragma unroll 1
    for (int row = 0; row < num_rows; row += kRowsInFlight) {
        uint4 raw[kRowsInFlight][kBatch];
#pragma unroll
        for (int i = 0; i < kRowsInFlight; ++i) {
            const uint4* from = rows(min(row + i, num_rows - 1));
#pragma unroll
            for (int j = 0; j < kBatch; ++j) {
                raw[i][j] = held[j];
                if (row + i < num_rows && from != nullptr && first + 32 * j < end) raw[i][j] = from[first + 32 * j];
            }
        }
#pragma unroll
        for (int i = 0; i < kRowsInFlight; ++i) {
            const float weight = weights(min(row + i, num_rows - 1));
            if (row + i >= num_rows) continue;
#pragma unroll
            for (int j = 0; j < kBatch; ++j) {
                float x[Values::kCount];
                Values::load(raw[i][j], x);
#pragma unroll
                for (int v = 0; v < Values::kCount; ++v)
                    sum[j][v] = kFused ? __fmaf_rn(weight, x[v], sum[j][v]) : __fadd_rn(sum[j][v], __fmul_rn(weight, x[v]));
            }
        }
    }
}

// Returns row `row` of `x`, or of the first `num_tensors` of `expert_rows` if there are any.
__device__ inline const std::byte* row_of(const ExpertRows& expert_rows, int num_tensors, const std::byte* x, int64_t row,
                                          int64_t row_bytes) {
    int part = 0;
#pragma unroll 1
    for (int rest = num_tensors; rest > 1;) {
        const int half = rest / 2;
        if (expert_rows.first_row[part + half] <= row) part += half;
        rest -= half;
    }
    return (num_tensors == 0 ? x : reinterpret_cast<const std::byte*>(expert_rows.rows[part])) + row * row_bytes;
}

// Convert 16 bytes of a row to fp32, and back, rounding to nearest even as on every backend.
template <DType kType>
struct Piece;

template <>
struct Piece<DType::kFloat32> {
    static constexpr int kCount = 4;
    static __device__ void load(const uint4& raw, float* x) {
        x[0] = __uint_as_float(raw.x), x[1] = __uint_as_float(raw.y), x[2] = __uint_as_float(raw.z), x[3] = __uint_as_float(raw.w);
    }
    static __device__ uint4 store(const float* x) {
        return make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]));
    }
};

template <class Half, Half (*kStore)(float), float (*kLoad)(Half)>
struct HalfPiece {
    static constexpr int kCount = 8;
    union Bits {
        uint4 raw;
        Half values[8];
        __device__ Bits() {}
    };
    static __device__ void load(const uint4& raw, float* x) {
        Bits bits;
        bits.raw = raw;
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = kLoad(bits.values[i]);
    }
    static __device__ uint4 store(const float* x) {
        Bits bits;
#pragma unroll
        for (int i = 0; i < 8; ++i) bits.values[i] = kStore(x[i]);
        return bits.raw;
    }
};

__device__ inline __nv_bfloat16 store_bf16(float x) { return __float2bfloat16_rn(x); }
__device__ inline float load_bf16(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline __half store_fp16(float x) { return __float2half_rn(x); }
__device__ inline float load_fp16(__half x) { return __half2float(x); }

template <>
struct Piece<DType::kBFloat16> : HalfPiece<__nv_bfloat16, store_bf16, load_bf16> {};
template <>
struct Piece<DType::kFloat16> : HalfPiece<__half, store_fp16, load_fp16> {};

// Compute the gradients of x, at `grad_x`, and of the weight, for row `row`, whose gradient is at `grad` (null: zeros). Each product and
// sum is rounded to fp32, and the row once to its dtype. One warp calls it.
template <DType kType>
__device__ void scale_row(const RowScaling& w, const std::byte* grad, std::byte* grad_x, int64_t row, int64_t row_bytes) {
    using Values = Piece<kType>;
    const uint4 *grads = pieces(grad), *values = pieces(row_of(w.expert_rows, w.expert_rows.num_tensors, w.x, row, row_bytes));
    uint4* to = pieces(grad_x);
    const float weight = w.weights[row];
    const int num_pieces = static_cast<int>(row_bytes / 16), lane = threadIdx.x % 32;
    constexpr int kBatch = 8;  // pieces of a thread in flight
    float sum = 0.0f;
#pragma unroll 1
    for (int first = lane; first < num_pieces; first += 32 * kBatch) {
        uint4 raw_x[kBatch], raw_grad[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
            if (first + 32 * i < num_pieces)
                raw_x[i] = values[first + 32 * i], raw_grad[i] = grad == nullptr ? uint4{} : grads[first + 32 * i];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            if (first + 32 * i >= num_pieces) continue;
            float g[Values::kCount], x[Values::kCount];
            Values::load(raw_grad[i], g);
            Values::load(raw_x[i], x);
#pragma unroll
            for (int j = 0; j < Values::kCount; ++j) {
                sum = __fadd_rn(sum, __fmul_rn(g[j], x[j]));
                g[j] = __fmul_rn(g[j], weight);
            }
            to[first + 32 * i] = Values::store(g);
        }
    }
#pragma unroll
    for (int step = 16; step >= 1; step /= 2) sum += __shfl_xor_sync(kFullWarp, sum, step);
    if (lane == 0) w.grad_weights[row] = sum;
}

}  // namespace deepep_moe

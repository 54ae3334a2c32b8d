// Stands for csrc/cuda/device/tensor_cores.cuh. Tiles lie permuted in shared memory, as there; they are loaded at once.
#pragma once

#include <array>
#include <cmath>
#include <cstdlib>

#include "cuda/device/ptx.cuh"
#include "cuda_bf16.h"
#include "cuda_fp8.h"

#define DEEPEP_MOE_TENSOR_CORES 1

struct float4 {
    float x, y, z, w;
};

namespace deepep_moe {

constexpr int kTileBytes = 128;
constexpr int kTileAlignment = 1024;

struct TileMap {
    const uint8_t* matrix;
    int64_t num_rows, num_columns;
    int tile_rows;
};

inline TileMap tile_map(const void* matrix, int64_t num_rows, int64_t num_columns, int tile_rows) {
    if ((reinterpret_cast<uintptr_t>(matrix) | static_cast<uintptr_t>(num_columns)) % 16 != 0 || tile_rows > 256) std::abort();
    return {static_cast<const uint8_t*>(matrix), num_rows, num_columns, tile_rows};
}

// A barrier: the parity of its phase in the highest bit, arrivals of a phase, those that are missing, bytes that are missing.
struct Pipe {
    uint64_t bytes : 24, missing : 16, arrivals : 16, unused : 7, parity : 1;

    void end_phase_if_complete() {
        if (missing == 0 && bytes == 0) parity ^= 1, missing = arrivals;
    }
};
static_assert(sizeof(Pipe) == sizeof(uint64_t));
inline Pipe& pipe_of(uint64_t* barrier) { return *reinterpret_cast<Pipe*>(barrier); }

inline void pipe_init(uint64_t* barrier, int arrivals) {
    const auto count = static_cast<uint64_t>(arrivals);
    pipe_of(barrier) = {0, count, count, 0, 0};
}
inline void pipe_expect(uint64_t* barrier, uint32_t bytes) {
    Pipe& pipe = pipe_of(barrier);
    if (pipe.missing == 0) std::abort();
    pipe.bytes += bytes, pipe.missing -= 1;
    pipe.end_phase_if_complete();
}
inline void pipe_arrive(uint64_t* barrier) { pipe_expect(barrier, 0); }
inline void pipe_wait(uint64_t* barrier, uint32_t parity) {
    while (pipe_of(barrier).parity == parity) emulation::pause();
}
inline void arrive_with(uint64_t* barrier, uint32_t bytes) {
    Pipe& pipe = pipe_of(barrier);
    if (pipe.bytes < bytes) std::abort();
    pipe.bytes -= bytes;
    pipe.end_phase_if_complete();
}
inline void pipe_load(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
    if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | bytes) % 16 != 0) std::abort();
    std::memcpy(to, from, bytes);
    arrive_with(barrier, bytes);
}

// The position of byte `column` of a tile's row.
inline int64_t permuted(int64_t row, int64_t column) { return row * kTileBytes + ((column / 16) ^ (row % 8)) * 16 + column % 16; }

inline void load_tile(void* to, const TileMap& map, int column, int row, uint64_t* barrier) {
    if (reinterpret_cast<uintptr_t>(to) % kTileAlignment != 0) std::abort();
    for (int64_t i = 0; i < map.tile_rows; ++i)
        for (int64_t j = 0; j < kTileBytes; ++j) {
            const bool is_inside = row + i < map.num_rows && column + j < map.num_columns;
            static_cast<uint8_t*>(to)[permuted(i, j)] = is_inside ? map.matrix[(row + i) * map.num_columns + column + j] : 0;
        }
    arrive_with(barrier, static_cast<uint32_t>(map.tile_rows * kTileBytes));
}
template <auto kKernel>
bool runs_on_tensor_cores() {
    return true;
}

// Blocks have no pairs here: the one block of a pair loads everything.
constexpr int kPair = 1;
#define DEEPEP_MOE_PAIRS
inline void sync_pair() { __syncthreads(); }
inline void pipe_arrive_in_pair(uint64_t* barrier, int) { pipe_arrive(barrier); }
inline void load_tile_to_pair(void* to, const TileMap& map, int column, int row, uint64_t* barrier) {
    load_tile(to, map, column, row, barrier);
}
inline void prefetch_map(const TileMap&) {}

template <int kRegisters>
void more_registers() {}
template <int kRegisters>
void fewer_registers() {}

inline const float* e4m3_values() {
    static const auto values = [] {
        std::array<float, 256> made;
        for (int i = 0; i < 256; ++i)
            made[static_cast<size_t>(i)] = __half2float(__nv_cvt_fp8_to_halfraw(static_cast<uint8_t>(i), __NV_E4M3));
        return made;
    }();
    return values.data();
}

inline void begin_products(float (&d)[64], const uint8_t* a, const uint8_t* b) {
    const float* const values = e4m3_values();
    const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32 % 4);
    for (int i = 0; i < 64; ++i) {
        const int64_t row = 16 * warp + lane / 4 + 8 * (i / 2 % 2), column = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
        float sum = 0.0f;
        for (int64_t k = 0; k < kTileBytes; ++k) sum += values[a[permuted(row, k)]] * values[b[permuted(column, k)]];
        d[i] = sum;
    }
}
template <int kPending = 0, int kCount>
void end_products(float (&)[kCount]) {}

inline float bf16_at(const uint8_t* tile, int64_t row, int64_t column) {
    __nv_bfloat16 value;
    std::memcpy(&value, tile + permuted(row, 2 * column), sizeof(value));
    return __bfloat162float(value);
}

inline void begin_products(float (&d)[128], const uint8_t* a, const uint8_t* b, int stride, bool adds) {
    const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32 % 4);
    for (int i = 0; i < 128; ++i) {
        const int64_t row = 16 * warp + lane / 4 + 8 * (i / 2 % 2), column = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
        float sum = adds ? d[i] : 0.0f;
        for (int64_t k = 0; k < 64; ++k) sum += bf16_at(a, k, row) * bf16_at(b + column / 64 * stride, k, column % 64);
        d[i] = sum;
    }
}

inline void add_to_memory(float* to, const float (&x)[4]) {
    if (reinterpret_cast<uintptr_t>(to) % 16 != 0) std::abort();
    for (int i = 0; i < 4; ++i) to[i] += x[i];
}

}  // namespace deepep_moe

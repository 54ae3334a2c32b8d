// Loads of byte tiles from global to shared memory, and products of fp8 tiles there, on Hopper (sm_90a). PTX ISA, sections "mbarrier",
// "cp.async.bulk.tensor" and "wgmma.mma_async". A tile's rows are 128 bytes. Its 16-byte pieces are permuted within each 8 rows (swizzle
// 128B), so that the tensor cores read without bank conflicts. A tile begins at a multiple of kTileAlignment.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "cuda/device/ptx.cuh"
#include "cuda/driver.h"

namespace deepep_moe {

constexpr int kTileBytes = 128;  // of one row of a tile
constexpr int kTileAlignment = 1024;

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define DEEPEP_MOE_TENSOR_CORES 1
#else
#define DEEPEP_MOE_TENSOR_CORES 0
#endif

// ---- on the host ----

using TileMap = CUtensorMap;

// A map of tiles of `tile_rows` rows, over a matrix of bytes [num_rows, num_columns]. Bytes outside of the matrix read as zero.
inline TileMap tile_map(const void* matrix, int64_t num_rows, int64_t num_columns, int tile_rows) {
    const cuuint64_t sizes[] = {static_cast<cuuint64_t>(num_columns), static_cast<cuuint64_t>(num_rows)};
    const cuuint64_t row_bytes[] = {static_cast<cuuint64_t>(num_columns)};
    const cuuint32_t box[] = {kTileBytes, static_cast<cuuint32_t>(tile_rows)}, steps[] = {1, 1};
    TileMap map;
    const CUresult error = DEEPEP_MOE_DRIVER(cuTensorMapEncodeTiled)(
        &map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<void*>(matrix), sizes, row_bytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (error != CUDA_SUCCESS)
        throw std::runtime_error("no tiles of [" + std::to_string(num_rows) + ", " + std::to_string(num_columns) +
                                 "] bytes: the matrix must begin at a multiple of 16 bytes, and so must its rows");
    return map;
}

#if DEEPEP_MOE_TENSOR_CORES

// ---- barriers of several arrivals ----

__device__ __forceinline__ void pipe_init(uint64_t* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void pipe_arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrive and announce bytes.
__device__ __forceinline__ void pipe_expect(uint64_t* barrier, uint32_t bytes) { barrier_expect(barrier, bytes); }
__device__ __forceinline__ void pipe_wait(uint64_t* barrier, uint32_t parity) { barrier_wait(barrier, parity); }
__device__ __forceinline__ void pipe_load(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
    bulk_load(to, from, bytes, barrier);
}

// Load the tile whose first byte is in column `column` of row `row`.
__device__ __forceinline__ void load_tile(void* to, const TileMap& map, int column, int row, uint64_t* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(shared_address(to)),
        "l"(reinterpret_cast<uint64_t>(&map)), "r"(shared_address(barrier)), "r"(column), "r"(row)
        : "memory");
}

__device__ __forceinline__ void prefetch_map(const TileMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(&map)) : "memory");
}

// ---- registers of a warp group ----

template <int kRegisters>
__device__ __forceinline__ void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- products ----

using Operand = uint64_t;

// The descriptor of a tile's rows from this address on, which is a multiple of 8 rows: stride 1024 bytes for 8 rows, swizzle 128B.
__device__ __forceinline__ Operand operand(const void* rows) {
    return (shared_address(rows) & 0x3ffff) >> 4 | uint64_t{1} << 16 | uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
}

// Multiply 64 rows by 128 rows, 32 bytes of each, into d; with `adds` add to d. Asynchronous.
__device__ __forceinline__ void multiply_32(float (&d)[64], Operand a, Operand b, int adds) {
    asm volatile(
        "{\n\t.reg .pred adds;\n\tsetp.ne.b32 adds, %66, 0;\n\t"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
        "%64, %65, adds, 1, 1;\n\t}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]),
          "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]),
          "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
          "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]),
          "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]),
          "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "l"(a), "l"(b), "r"(adds)
        : "memory");
}

__device__ __forceinline__ void keep_order(float (&d)[64]) {
#pragma unroll
    for (int i = 0; i < 64; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// A warp group: begin to compute d, the products of 64 rows of one tile with 128 rows of another. Element d[i] has
// row 16 * (warp of the group) + lane / 4 + 8 * (i / 2 % 2). Its column is 8 * (i / 4) + 2 * (lane % 4) + i % 2.
__device__ __forceinline__ void begin_products(float (&d)[64], const uint8_t* a, const uint8_t* b) {
    keep_order(d);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    const Operand first = operand(a), second = operand(b);
#pragma unroll
    for (int k = 0; k < kTileBytes / 32; ++k) multiply_32(d, first + 2 * k, second + 2 * k, k != 0);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    keep_order(d);
}

// d may be used once this has returned.
__device__ __forceinline__ void end_products(float (&d)[64]) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    keep_order(d);
}

#endif

}  // namespace deepep_moe

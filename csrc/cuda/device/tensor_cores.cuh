// Loads tiles of bytes from global to shared memory and multiplies fp8 and bf16 tiles there, on Hopper (sm_90a). The PTX ISA describes this
// under "mbarrier", "cp.async.bulk.tensor" and "wgmma.mma_async". A tile's rows are 128 bytes. Their 16-byte pieces are permuted within
// each 8 rows (swizzle 128B), so that tensor cores read without bank conflicts. A tile begins at a multiple of kTileAlignment.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <stdexcept>
#include <string>

#include "cuda/device/launch.cuh"
#include "cuda/device/ptx.cuh"

namespace deepep_moe {

constexpr int kTileBytes = 128;  // bytes of one row of a tile
constexpr int kTileAlignment = 1024;

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define DEEPEP_MOE_TENSOR_CORES 1
#else
#define DEEPEP_MOE_TENSOR_CORES 0
#endif

// ---- on the host ----

using TileMap = CUtensorMap;

// Returns a map of tiles of `tile_rows` rows over a matrix of bytes [num_rows, num_columns]. Bytes outside of the matrix read as zero.
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

// Returns whether the current GPU runs the part of the kernel that is compiled for Hopper's tensor cores only.
template <auto kKernel>
bool runs_on_tensor_cores() {
    constexpr int kUnknown = 0, kRuns = 1, kDoesNot = 2;
    static std::atomic<int> states[kMaxDevices] = {};
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess || device >= kMaxDevices) return false;
    int state = states[device].load(std::memory_order_relaxed);
    cudaFuncAttributes attributes;
    if (state == kUnknown && cudaFuncGetAttributes(&attributes, kKernel) == cudaSuccess) {
        state = attributes.ptxVersion == 90 && attributes.binaryVersion == 90 ? kRuns : kDoesNot;
        states[device].store(state, std::memory_order_relaxed);
    }
    return state == kRuns;
}

// ---- pairs of blocks that reach each other's shared memory ----

constexpr int kPair = 2;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define DEEPEP_MOE_PAIRS
#else
#define DEEPEP_MOE_PAIRS __cluster_dims__(kPair, 1, 1)
#endif

#if DEEPEP_MOE_TENSOR_CORES

// Synchronize all threads of both blocks.
__device__ __forceinline__ void sync_pair() {
    asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
}

// ---- barriers of several arrivals ----

__device__ __forceinline__ void pipe_init(uint64_t* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void pipe_arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrive at the same barrier of the given block of the pair.
__device__ __forceinline__ void pipe_arrive_in_pair(uint64_t* barrier, int block) {
    asm volatile(
        "{\n\t.reg .b32 there;\n\tmapa.shared::cluster.u32 there, %0, %1;\n\t"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n\t}" ::"r"(shared_address(barrier)),
        "r"(block)
        : "memory");
}

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

// Load a tile into both blocks of the pair. Each one's barrier counts the bytes.
__device__ __forceinline__ void load_tile_to_pair(void* to, const TileMap& map, int column, int row, uint64_t* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::
            "r"(shared_address(to)),
        "l"(reinterpret_cast<uint64_t>(&map)), "r"(shared_address(barrier)), "r"(column), "r"(row),
        "h"(static_cast<uint16_t>((1 << kPair) - 1))
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

// Returns the descriptor of a tile's rows from this address on, which is a multiple of 8 rows: stride 1024 bytes for 8 rows, swizzle 128B.
__device__ __forceinline__ Operand operand(const void* rows) {
    return (shared_address(rows) & 0x3ffff) >> 4 | uint64_t{1} << 16 | uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
}

// Registers of an array that an instruction reads and writes.
#define DEEPEP_MOE_8(i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define DEEPEP_MOE_32(i) DEEPEP_MOE_8(i), DEEPEP_MOE_8(i + 8), DEEPEP_MOE_8(i + 16), DEEPEP_MOE_8(i + 24)

// Begin to multiply 64 rows by 128 rows, 32 bytes of each, into d; with `adds` the products are added to d.
__device__ __forceinline__ void multiply_32(float (&d)[64], Operand a, Operand b, int adds) {
    asm volatile(
        "{\n\t.reg .pred adds;\n\tsetp.ne.b32 adds, %66, 0;\n\t"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
        "%64, %65, adds, 1, 1;\n\t}"
        : DEEPEP_MOE_32(0), DEEPEP_MOE_32(32)
        : "l"(a), "l"(b), "r"(adds)
        : "memory");
}

template <int kCount>
__device__ __forceinline__ void keep_order(float (&d)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Begin to compute d, the products of 64 rows of one tile with 128 rows of another. A warp group calls it. Element d[i] has
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

// Wait until all but the newest kPending products have read their operands. With kPending 0 d may be used afterwards.
template <int kPending = 0, int kCount>
__device__ __forceinline__ void end_products(float (&d)[kCount]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
    keep_order(d);
}

// Returns the descriptor of bf16 columns of a tile, from the 64 at this address on. The next 64 begin `stride` bytes after them.
__device__ __forceinline__ Operand column_operand(const void* columns, int stride) {
    return (shared_address(columns) & 0x3ffff) >> 4 | uint64_t(stride >> 4) << 16 | uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
}

// Begin to multiply 64 transposed columns by 256 columns, 16 rows of each, into d; with `adds` the products are added to d.
__device__ __forceinline__ void multiply_16_rows(float (&d)[128], Operand a, Operand b, int adds) {
    asm volatile(
        "{\n\t.reg .pred adds;\n\tsetp.ne.b32 adds, %130, 0;\n\t"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,"
        "%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,"
        "%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,"
        "%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127}, "
        "%128, %129, adds, 1, 1, 1, 1;\n\t}"
        : DEEPEP_MOE_32(0), DEEPEP_MOE_32(32), DEEPEP_MOE_32(64), DEEPEP_MOE_32(96)
        : "l"(a), "l"(b), "r"(adds)
        : "memory");
}
#undef DEEPEP_MOE_32
#undef DEEPEP_MOE_8

// Begin the products of bf16 tiles of 64 rows: 64 columns of one, transposed, with 256 columns of another, `stride` bytes for each 64. With
// `adds` they are added to d.
__device__ __forceinline__ void begin_products(float (&d)[128], const uint8_t* a, const uint8_t* b, int stride, bool adds) {
    keep_order(d);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    const Operand first = column_operand(a, stride), second = column_operand(b, stride);
    constexpr int kStep = 16 * kTileBytes >> 4;  // 16 rows
#pragma unroll
    for (int k = 0; k < 4; ++k) multiply_16_rows(d, first + k * kStep, second + k * kStep, adds || k != 0);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    keep_order(d);
}

// Add four floats to memory that no other thread touches meanwhile, without waiting.
__device__ __forceinline__ void add_to_memory(float* to, const float (&x)[4]) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
                 : "memory");
}

#endif

}  // namespace deepep_moe

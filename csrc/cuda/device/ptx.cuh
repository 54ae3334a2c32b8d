// Wraps PTX instructions that CUDA C++ has no name for. They are all here, and nothing else is, because tests/emulation replaces these
// functions on a machine without a GPU.
#pragma once

#include <cstdint>

namespace deepep_moe {

// ---- flags ----

__device__ __forceinline__ unsigned long long load_acquire(const unsigned long long* flag) {
    unsigned long long value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
    return value;
}

// For a word that carries its own flag.
__device__ __forceinline__ unsigned long long load_relaxed(const unsigned long long* word) {
    unsigned long long value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

__device__ __forceinline__ void store_release(unsigned long long* flag, unsigned long long value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}

// For flags that only this GPU reads.
__device__ __forceinline__ void store_release_local(unsigned long long* flag, unsigned long long value) {
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}

// For counters that only this GPU reads.
__device__ __forceinline__ void add_release_local(unsigned long long* counter, unsigned long long value) {
    asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(counter), "l"(value) : "memory");
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }

// A word in shared memory passes a value on within a block. The first function takes the word and leaves `value`; the second puts `value`
// if the word is `expected`.
__device__ __forceinline__ unsigned long long exchange_acquire_block(unsigned long long* word, unsigned long long value) {
    unsigned long long old;
    asm volatile("atom.acquire.cta.shared.exch.b64 %0, [%1], %2;" : "=l"(old) : "r"(shared_address(word)), "l"(value) : "memory");
    return old;
}

__device__ __forceinline__ bool replace_release_block(unsigned long long* word, unsigned long long expected, unsigned long long value) {
    unsigned long long old;
    asm volatile("atom.release.cta.shared.cas.b64 %0, [%1], %2, %3;"
                 : "=l"(old)
                 : "r"(shared_address(word)), "l"(expected), "l"(value)
                 : "memory");
    return old == expected;
}

// For a word that carries its own flag, and announces no other writes of this kernel.
__device__ __forceinline__ void store_relaxed(unsigned long long* flag, unsigned long long value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}

// ---- 16 bytes of a line that eight threads store, or load, at once ----

// All threads of a warp must call these together, so that one instruction accesses a whole line. A thread whose part counts `uses` it.
__device__ __forceinline__ void store_part(uint4* to, const uint4& value, bool uses) {
    if (uses)
        asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(value.x), "r"(value.y), "r"(value.z),
                     "r"(value.w)
                     : "memory");
}

__device__ __forceinline__ uint4 load_part(const uint4* from, bool uses) {
    uint4 value = make_uint4(0, 0, 0, 0);
    if (uses)
        asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                     : "l"(from)
                     : "memory");
    return value;
}

__device__ __forceinline__ void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

__device__ __forceinline__ unsigned long long now_ns() {
    unsigned long long time;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
    return time;
}

__device__ __forceinline__ void pause_ns(unsigned ns) { asm volatile("nanosleep.u32 %0;" ::"r"(ns)); }

// ---- arithmetic ----

// Returns 1 / x to about 20 bits, for a normal x.
__device__ __forceinline__ double approximate_reciprocal(double x) {
    double y;
    asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(y) : "d"(x));
    return y;
}

__device__ __forceinline__ float max_or_nan(float a, float b) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
}

// ---- copies of 16 bytes to shared memory that only the copying thread reads (sm_80) ----

__device__ __forceinline__ void copy_async(void* to_shared, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to_shared)), "l"(from) : "memory");
}

// Wait until this thread's copies are complete.
__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---- bulk copies (sm_90): from and to shared memory, 16-byte aligned, in multiples of 16 bytes ----

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define DEEPEP_MOE_BULK_COPIES 1
#else
#define DEEPEP_MOE_BULK_COPIES 0
#endif

#if DEEPEP_MOE_BULK_COPIES

// Initialize a barrier that completes once one thread has arrived and the bytes that it announced are there.
__device__ __forceinline__ void barrier_init(uint64_t* barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}

// Make initialized barriers visible to bulk copies.
__device__ __forceinline__ void barrier_publish() {
    asm volatile("fence.mbarrier_init.release.cluster;\n\tfence.proxy.async;" ::: "memory");
}

__device__ __forceinline__ void barrier_expect(uint64_t* barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
    asm volatile(
        "{\n\t.reg .pred done;\n\tagain_%=: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t@!done bra again_%=;\n\t}" ::"r"(
            shared_address(barrier)),
        "r"(parity)
        : "memory");
}

__device__ __forceinline__ void bulk_load(void* to_shared, const void* from, uint32_t bytes, uint64_t* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to_shared)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

__device__ __forceinline__ void bulk_store(void* to, const void* from_shared, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from_shared)), "r"(bytes)
                 : "memory");
}

// Make one group of the stores since the last commit.
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Wait until all but the newest `kPending` groups have read shared memory.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Wait until all but the newest `kPending` groups are written, visible to whoever sees this thread's next release.
template <int kPending>
__device__ __forceinline__ void bulk_wait_written() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// Order plain accesses and bulk copies of the same bytes: in any memory, or in shared memory only.
__device__ __forceinline__ void fence_bulk_copies() { asm volatile("fence.proxy.async;" ::: "memory"); }
__device__ __forceinline__ void fence_bulk_copies_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#else

__device__ __forceinline__ void fence_bulk_copies() {}

#endif

// ---- programmatic dependent launch: a kernel starts while the previous one on the stream still runs (sm_90) ----

// The next kernel may start once all blocks of this one have called this or ended.
__device__ __forceinline__ void let_next_kernel_start() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Wait until the previous kernel has finished. Every kernel that starts early must call this before it exits, even if it needs none of that
// kernel's data; otherwise a later kernel could overtake it.
__device__ __forceinline__ void wait_for_kernel_before() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Returns the dynamic shared memory of a block.
template <class T>
__device__ __forceinline__ T* shared_memory() {
    extern __shared__ __align__(128) unsigned char deepep_moe_shared_memory[];
    return reinterpret_cast<T*>(deepep_moe_shared_memory);
}

}  // namespace deepep_moe

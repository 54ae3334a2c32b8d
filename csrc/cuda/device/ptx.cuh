// The instructions that CUDA C++ has no name for. All of them are here, and nothing else is: tests/emulation has the same functions
// for a processor without a GPU.
#pragma once

#include <cstdint>

namespace deepep_moe {

// ---- flags ----

__device__ __forceinline__ unsigned long long load_acquire(const unsigned long long* flag) {
    unsigned long long value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
    return value;
}

// Of a word that is its own flag.
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

// For words in shared memory that hand something over within a block: taken in exchange for `value`, put where there is `expected`.
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

// For a word that says all there is to say, and announces nothing written by this kernel.
__device__ __forceinline__ void store_relaxed(unsigned long long* flag, unsigned long long value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}

// ---- 16 bytes of a line that eight lanes store, or load, at once ----

// All lanes of a warp must call these together, or a line is not of one instruction; `uses`: whether this one's counts.
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

// 1 / x to about 20 bits, of a normal x.
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

// ---- copies of 16 bytes to shared memory that a thread makes for itself (sm_80) ----

__device__ __forceinline__ void copy_async(void* to_shared, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to_shared)), "l"(from) : "memory");
}

// Until they have happened.
__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---- bulk copies (sm_90): from and to shared memory, 16-byte aligned, in multiples of 16 bytes ----

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define DEEPEP_MOE_BULK_COPIES 1
#else
#define DEEPEP_MOE_BULK_COPIES 0
#endif

#if DEEPEP_MOE_BULK_COPIES

// A barrier that one arrival, and the bytes it announces, complete.
__device__ __forceinline__ void barrier_init(uint64_t* barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}

// Makes initialized barriers known to bulk copies.
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

// Stores since the last commit are a group.
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until all but the newest `kPending` groups have read shared memory,
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// or have written what they write, for whoever sees this thread's next release.
template <int kPending>
__device__ __forceinline__ void bulk_wait_written() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// Between plain accesses and bulk copies of the same bytes: of any memory, of shared memory.
__device__ __forceinline__ void fence_bulk_copies() { asm volatile("fence.proxy.async;" ::: "memory"); }
__device__ __forceinline__ void fence_bulk_copies_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#else

__device__ __forceinline__ void fence_bulk_copies() {}

#endif

// ---- a kernel that starts while the one before it on the stream still runs (sm_90) ----

// Once all blocks of this kernel have come here or ended.
__device__ __forceinline__ void let_next_kernel_start() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Of a kernel that starts early: until the one before it has ended. Also where it needs nothing of that one, by its own end at the latest,
// so that what comes after this kernel comes after both.
__device__ __forceinline__ void wait_for_kernel_before() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The dynamic shared memory of a block.
template <class T>
__device__ __forceinline__ T* shared_memory() {
    extern __shared__ __align__(128) unsigned char deepep_moe_shared_memory[];
    return reinterpret_cast<T*>(deepep_moe_shared_memory);
}

}  // namespace deepep_moe

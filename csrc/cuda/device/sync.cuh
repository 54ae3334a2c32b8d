// Flags between GPUs, and the one way to wait for one.
#pragma once

#include "common/gpu_params.h"

namespace deepep_moe {

constexpr unsigned kFullWarp = 0xffffffffu;

__device__ __forceinline__ unsigned long long load_acquire(const unsigned long long* flag) {
    unsigned long long value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
    return value;
}

__device__ __forceinline__ void store_release(unsigned long long* flag, unsigned long long value) {
    asm volatile("fence.acq_rel.sys;\n\tst.release.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}

__device__ __forceinline__ unsigned long long now_ns() {
    unsigned long long time;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
    return time;
}

// Tells the host. Every failure but an exceeded bound ends the rank's part in the call; the first one is kept.
__device__ inline void report(const GpuContext& c, GpuFailureKind kind, int peer, GpuPhase phase, long long expected, long long seen) {
    if (kind != kBoundExceeded && atomicCAS(c.gave_up, 0, 1) != 0) return;
    volatile GpuFailure* failure = c.failure;
    failure->peer = peer;
    failure->phase = static_cast<int>(phase);
    failure->expected = expected;
    failure->seen = seen;
    __threadfence_system();
    failure->kind = kind;
}

// Until *flag reaches `expected`. False, with the failure reported, past the deadline or once another wait of this rank has failed.
__device__ inline bool wait_flag(const GpuContext& c, const unsigned long long* flag, unsigned long long expected, int peer, GpuPhase phase) {
    unsigned long long seen = load_acquire(flag);
    if (seen >= expected) return true;
    const unsigned long long deadline = now_ns() + c.timeout_ns;
    for (int round = 0; (seen = load_acquire(flag)) < expected; ++round) {
        if (round % 256 != 255) continue;
        if (*static_cast<volatile int*>(c.gave_up) != 0) return false;
        if (now_ns() < deadline) continue;
        report(c, kTimeout, peer, phase, static_cast<long long>(expected), static_cast<long long>(seen));
        return false;
    }
    return true;
}

struct Workspace {
    __device__ Workspace(const GpuContext& c, int owner) : layout(c.config), base(c.workspaces[owner]), config(c.config) {}
    __device__ unsigned long long* entered(int source) const { return flag(layout.entered, source); }
    __device__ unsigned long long* refused(int source) const { return flag(layout.refused, source); }
    __device__ unsigned long long* counts_ready(int source) const { return flag(layout.counts_ready, source); }
    __device__ unsigned long long* arrived(int source, int64_t chunk) const { return flag(layout.arrived, source * layout.num_chunks + chunk); }
    __device__ int32_t* counts(unsigned long long sequence, int source) const {
        return reinterpret_cast<int32_t*>(base + layout.counts) + ((sequence & 1) * config.num_ranks + source) * layout.columns;
    }
    __device__ std::byte* slot(int source, int64_t index, const GpuSlotLayout& slot) const {
        return base + layout.staging + source * layout.staging_bytes + index * slot.bytes;
    }

    const GpuWorkspaceLayout layout;
    std::byte* const base;
    const GpuWorkspaceConfig& config;

private:
    __device__ unsigned long long* flag(int64_t offset, int64_t index) const { return reinterpret_cast<unsigned long long*>(base + offset) + index; }
};

}  // namespace deepep_moe

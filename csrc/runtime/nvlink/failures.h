// What kernels have reported, as text and as exceptions: for calls of the exchange and of low latency alike.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <string>

#include "cuda/waits.h"
#include "runtime/nvlink/memory.h"

namespace deepep_moe {

// Has a kernel of this rank reported something? slot: host memory that kernels write to; nobody waits for the GPU.
inline bool has_failed(const GpuFailure& slot) { return static_cast<const volatile GpuFailure&>(slot).kind != kNoFailure; }

class Failures {
public:
    // memory: names the processes of peers; it outlives this.
    Failures(const GpuMemory& memory, int rank, int num_experts, double timeout_s)
        : memory_(memory), rank_(rank), num_experts_(num_experts), timeout_s_(timeout_s) {}
    void create();  // on the current device, before use
    void destroy();

    // Returns the failure in `slot`. Once `is_done` says that the buffer's own work has ended, which after a failure takes microseconds,
    // this clears the slot and the `num_bytes` of device memory at `words`, by which kernels know of it. Somebody else's work on the same
    // stream, a collective that waits for the same peer, may keep it from ending: after some seconds the failure stays, and the next call
    // finds it again.
    GpuFailure take(GpuFailure& slot, void* words, size_t num_bytes, const std::function<bool()>& is_done) const;
    // Clears these. Nothing of the buffer may run.
    void forget(GpuFailure& slot, void* words, size_t num_bytes) const;
    // Copies device memory, whatever the GPU is doing besides.
    void read(void* to, const void* from, size_t num_bytes) const;

    // What `rank` has reported, of the kinds that every call has: bad routing, a failed handle, a wait in vain. Others are "unknown".
    std::string describe(const GpuFailure& failure, int rank) const;
    // Throws it, of this rank: std::invalid_argument, PeerError or TimeoutError.
    [[noreturn]] void raise(const GpuFailure& failure) const;
    std::string peer_refused(int peer, const std::string& reason) const;

private:
    std::string describe_lack(const GpuFailure& failure, int rank) const;

    const GpuMemory& memory_;
    const int rank_, num_experts_;
    const double timeout_s_;
    cudaStream_t stream_ = nullptr;  // of this object's own: waits for nobody else's work
};

}  // namespace deepep_moe

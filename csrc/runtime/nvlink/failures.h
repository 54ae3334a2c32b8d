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

// Kernels know a peer by its index in this node, or as `rail_peer` of its node; messages and exceptions by its number in the group.
struct RankNumbers {
    int ranks_per_node, node, index;  // of this rank

    // What `reporter`, a peer of this rank or itself, calls `peer`.
    int of(int reporter, int peer) const {
        const int its_node = is_rail_peer(reporter) ? reporter - kFirstRailPeer : node,
                  its_index = is_rail_peer(reporter) ? index : reporter;
        return is_rail_peer(peer) ? (peer - kFirstRailPeer) * ranks_per_node + its_index : its_node * ranks_per_node + peer;
    }
    int of(int peer) const { return of(index, peer); }
    // The peer with this number; -1: none.
    int peer(int number) const {
        if (number / ranks_per_node == node) return number % ranks_per_node;
        return number % ranks_per_node == index ? rail_peer(number / ranks_per_node) : -1;
    }
};

class Failures {
public:
    // memory: names the processes of peers; it outlives this. timeout_s: of waits for ranks of this node, and for those of other nodes.
    Failures(const GpuMemory& memory, const RankNumbers& numbers, int num_experts, double timeout_s, double rail_timeout_s)
        : memory_(memory), numbers_(numbers), num_experts_(num_experts), timeout_s_(timeout_s), rail_timeout_s_(rail_timeout_s) {}
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

    // What this rank or a peer has reported, of the kinds that every call has: bad routing, a failed handle, a wait in vain. Others are
    // "unknown".
    std::string describe(const GpuFailure& failure, int reporter) const;
    // Throws it, of this rank: std::invalid_argument, PeerError or TimeoutError.
    [[noreturn]] void raise(const GpuFailure& failure) const;
    std::string peer_refused(int peer, const std::string& reason) const;
    // A reason to pass on: begins with the class of the error that the reporter raises, as those do that hosts give.
    static std::string reason_of(const GpuFailure& failure, const std::string& description);

private:
    std::string describe_lack(const GpuFailure& failure, int reporter) const;
    double deadline_of(const GpuFailure& failure, int reporter) const;

    const GpuMemory& memory_;
    const RankNumbers numbers_;
    const int num_experts_;
    const double timeout_s_, rail_timeout_s_;
    cudaStream_t stream_ = nullptr;  // of this object's own: waits for nobody else's work
};

}  // namespace deepep_moe

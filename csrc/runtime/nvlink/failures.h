// Turns failures that kernels have reported into text and exceptions, for calls of the exchange and of low latency.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <string>

#include "cuda/waits.h"
#include "runtime/nvlink/memory.h"

namespace deepep_moe {

// Returns whether a kernel of this rank has reported a failure in `slot`, which is host memory. It does not wait for the GPU.
inline bool has_failed(const GpuFailure& slot) { return static_cast<const volatile GpuFailure&>(slot).kind != kNoFailure; }

// Kernels name a peer by its index in this node, or as `rail_peer` of its node. Messages and exceptions use its number in the group.
struct RankNumbers {
    int ranks_per_node, node, index;  // node and index of this rank

    // Returns the number in the group of the rank that `reporter`, this rank or a peer, calls `peer`.
    int of(int reporter, int peer) const {
        const int its_node = is_rail_peer(reporter) ? reporter - kFirstRailPeer : node,
                  its_index = is_rail_peer(reporter) ? index : reporter;
        return is_rail_peer(peer) ? (peer - kFirstRailPeer) * ranks_per_node + its_index : its_node * ranks_per_node + peer;
    }
    int of(int peer) const { return of(index, peer); }
    // Returns the peer that has this number in the group, or -1.
    int peer(int number) const {
        if (number / ranks_per_node == node) return number % ranks_per_node;
        return number % ranks_per_node == index ? rail_peer(number / ranks_per_node) : -1;
    }
};

class Failures {
public:
    // `memory` names the processes of peers, and must outlive this. The timeouts are those for ranks of this node and of other nodes.
    Failures(const GpuMemory& memory, const RankNumbers& numbers, int num_experts, double timeout_s, double rail_timeout_s)
        : memory_(memory), numbers_(numbers), num_experts_(num_experts), timeout_s_(timeout_s), rail_timeout_s_(rail_timeout_s) {}
    void create();  // on the current device, before use

    // Return the failure in `slot`. Once `is_done` says that the buffer's own work has ended, clear the slot and the `num_bytes` of device
    // memory at `words`, by which kernels know of the failure. After a failure that work ends within microseconds. But other work on the
    // same stream, such as a collective that waits for the same peer, may keep it from ending. Then, after some seconds, the failure stays
    // in the slot, and the next call finds it again.
    GpuFailure take(GpuFailure& slot, void* words, size_t num_bytes, const std::function<bool()>& is_done) const;
    // Clear a slot and its words. No work of the buffer may be running.
    void forget(GpuFailure& slot, void* words, size_t num_bytes) const;
    // Copy device memory to the host, even while the GPU runs other work.
    void read(void* to, const void* from, size_t num_bytes) const;

    // Describe a failure of this rank or a peer: bad routing, a failed handle, a wait in vain. Other kinds are "unknown".
    std::string describe(const GpuFailure& failure, int reporter) const;
    // Throw a failure of this rank: std::invalid_argument, PeerError or TimeoutError.
    [[noreturn]] void raise(const GpuFailure& failure) const;
    std::string peer_refused(int peer, const std::string& reason) const;
    // Returns a reason to pass on. It begins with the class of the error that the reporter raises, like the reasons that hosts give.
    static std::string reason_of(const GpuFailure& failure, const std::string& description);

private:
    std::string describe_lack(const GpuFailure& failure, int reporter) const;
    double deadline_of(const GpuFailure& failure, int reporter) const;

    const GpuMemory& memory_;
    const RankNumbers numbers_;
    const int num_experts_;
    const double timeout_s_, rail_timeout_s_;
    Stream stream_;  // used only by this object, so that its copies wait for no other work
};

}  // namespace deepep_moe

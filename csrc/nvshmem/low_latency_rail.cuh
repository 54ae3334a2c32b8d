// What the low-latency kernels over nodes share: puts to the ranks of the rail, and waits for what they put. Sources include NVSHMEM's
// headers before it.
#pragma once

#include <string>

#include "cuda/device/launch.cuh"
#include "cuda/device/low_latency_lines.cuh"
#include "cuda/low_latency_rail.h"

namespace deepep_moe {

// This rank's symmetric memory, in one call.
struct RailCallMemory {
    const LowLatencyRailContext& r;
    const LowLatencyContext& c;
    const unsigned long long call;

    __device__ RailCallMemory(const LowLatencyRailContext& r, unsigned long long call) : r(r), c(r.context), call(call) {}

    __device__ int first_rank() const { return r.node * r.ranks_per_node; }               // of this node
    __device__ int rank_in(int node) const { return node * r.ranks_per_node + r.index; }  // of this rail
    __device__ int node_at(int turn) const { return (r.node + turn) % r.num_nodes; }      // the next node first
    __device__ bool is_lost(int node) const { return is_masked(c, rank_in(node)); }       // nothing crosses to or from there
    __device__ int64_t tokens() const { return c.config.num_max_tokens; }                 // of a rank, at most
    __device__ int experts_of_node() const { return r.ranks_per_node * c.config.num_local_experts; }

    __device__ LowLatencyRailMessage* in(int node) const { return at<LowLatencyRailMessage>(r.layout.in_of(call, node)); }
    __device__ LowLatencyRailMessage* out(int node) const { return at<LowLatencyRailMessage>(r.layout.out_of(call, node)); }
    __device__ std::byte* inbox(int node) const { return r.base + r.layout.inbox + r.layout.box_of(call, r.node, node); }
    __device__ std::byte* outbox(int node) const { return r.base + r.layout.outbox + r.layout.box_of(call, r.node, node); }

    // One thread: until the word that `node` sets has reached this call. False: it is masked, or has been now, or the failure is reported.
    __device__ bool wait(int64_t offset, int node, GpuPhase phase, unsigned long long timeout_ns) const {
        auto* const word = at<unsigned long long>(offset);
        const int peer = rank_in(node);
        unsigned long long seen = load_acquire(word);
        if (seen < call) {
            if (is_masked(c, peer)) return false;
            seen = watch_word<kPauseNs, kLooks>(
                c, word, [](const unsigned long long* from) { return load_acquire(from); }, call, peer, timeout_ns);
        }
        if (seen >= call) {
            nvshmem_uint64_test(reinterpret_cast<uint64_t*>(word), NVSHMEM_CMP_GE, call);
            return true;
        }
        mask_or_report(c, peer, phase, call, seen << kWhatBits);
        return false;
    }
    __device__ bool wait_entry(int node, unsigned long long timeout_ns) const {
        return wait(r.layout.entered_of(call, node), node, GpuPhase::kRailEntry, timeout_ns);
    }
    __device__ bool wait_rows(int node, int chunk, unsigned long long timeout_ns) const {
        return wait(r.layout.arrived_of(call, node, chunk), node, GpuPhase::kRailRows, timeout_ns);
    }

    // All threads of a block, which have written it: the message for a node.
    __device__ void put_message(int node, int64_t bytes) const {
        put(r.layout.out_of(call, node), r.layout.in_of(call, r.node), round_up(bytes, 16), r.layout.entered_of(call, r.node), node);
    }
    // Likewise: rows of a chunk, which lie from `first_byte` on of the outbox for a node.
    __device__ void put_rows(int node, int chunk, int64_t first_byte, int64_t bytes) const {
        put(r.layout.outbox + r.layout.box_of(call, r.node, node) + first_byte,
            r.layout.inbox + r.layout.box_of(call, node, r.node) + first_byte, bytes, r.layout.arrived_of(call, r.node, chunk), node);
    }

    // One thread: enters the call in a message for `node`, without rows.
    __device__ LowLatencyRailMessage& enter(int node, unsigned long long flag) const {
        LowLatencyRailMessage& message = *out(node);
        message.flag = flag;
        message.num_tokens = message.num_rows = 0;
        message.reason.why = {};
        message.reason.text[0] = '\0';
        return message;
    }

private:
    template <class T>
    __device__ T* at(int64_t offset) const {
        return reinterpret_cast<T*>(r.base + offset);
    }
    __device__ void put(int64_t from, int64_t to, int64_t bytes, int64_t word, int node) const {
        fence_system();
        __syncthreads();
        nvshmemx_putmem_signal_nbi_block(r.base + to, r.base + from, bytes, reinterpret_cast<uint64_t*>(r.base + word), call,
                                         NVSHMEM_SIGNAL_SET, r.pes[node]);
        __syncthreads();
    }
};

// What the message of a dispatch has besides.
struct RailRouting {
    int32_t *slots, *topk_idx;
    float* topk_weights;
    __device__ RailRouting(LowLatencyRailMessage* message, int num_tokens, int num_topk)
        : slots(reinterpret_cast<int32_t*>(message + 1)),
          topk_idx(slots + num_tokens),
          topk_weights(reinterpret_cast<float*>(topk_idx + num_tokens * num_topk)) {}
    __device__ static int64_t bytes(int num_tokens, int num_topk) {
        return static_cast<int64_t>(sizeof(LowLatencyRailMessage)) + int64_t{4} * num_tokens * (1 + 2 * num_topk);
    }
};

// The arrays of a handle, those of one node.
struct RailHandle {
    std::byte* const memory;
    const LowLatencyRailHandle layout;
    const int64_t num_tokens;
    __device__ RailHandle(const LowLatencyRailContext& r, const std::byte* memory)
        : memory(const_cast<std::byte*>(memory)), layout(r.context.config, r.num_nodes), num_tokens(r.context.config.num_max_tokens) {}
    __device__ int32_t& num_in(int node) const { return of(layout.num_in)[node]; }
    __device__ int32_t* in_tokens(int node) const { return of(layout.in_tokens) + node * num_tokens; }
    __device__ int32_t* in_ranks(int node) const { return of(layout.in_ranks) + node * num_tokens; }
    __device__ int32_t* out_slots(int node) const { return of(layout.out_slots) + node * num_tokens; }

private:
    __device__ int32_t* of(int64_t offset) const { return reinterpret_cast<int32_t*>(memory + offset); }
};

// As long as a row's rank may wait for one of its own node first, and then tell.
__device__ __forceinline__ unsigned long long behind_node_ns(const LowLatencyContext& c) { return 2 * c.timeout_ns; }

template <auto kKernel, class Params>
const char* try_launch(const char* name, int blocks, int64_t shared_bytes, const Params& params, void* stream) noexcept {
    static thread_local std::string error;
    try {
        launch<kKernel>(name, blocks, tuning::kLowLatencyThreads, shared_bytes, params, stream);
        return nullptr;
    } catch (const std::exception& caught) {
        error = caught.what();
        return error.c_str();
    }
}

}  // namespace deepep_moe

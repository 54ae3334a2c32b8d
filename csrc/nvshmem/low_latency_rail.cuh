// Low-latency kernels put to the ranks of their rail by this. Sources include NVSHMEM's headers before this one.
#pragma once

#include "cuda/device/launch.cuh"
#include "cuda/device/low_latency_lines.cuh"
#include "cuda/device/low_latency_rail.cuh"

namespace deepep_moe {

// Makes this rank's puts on a rail in one call.
struct RailPuts : RailCall {
    using RailCall::RailCall;

    __device__ std::byte* message_for(int node) const { return base() + r.layout.out_of(call, node); }
    __device__ std::byte* row_for(int node, int token, int64_t row_bytes) const {
        return base() + r.layout.outbox + r.layout.box_of(call, r.node, node) + token * row_bytes;
    }

    // Put the message that the block has written, and enter the call in a node, unless its rank is masked. All threads of a block call it.
    __device__ void put_message(int node, int64_t bytes, unsigned long long flag) const {
        __syncthreads();
        if (threadIdx.x / 32 == 0 && !sees_lost(node)) put(message_of(node, bytes), node, flag);
        __syncthreads();
    }
    // Put the weights that the block has written behind the message, before the call's entry in the node. All threads of a block call it.
    __device__ void put_weights(int node, int64_t bytes, unsigned long long flag) const {
        __syncthreads();
        const int64_t at = r.layout.weights;
        if (threadIdx.x / 32 == 0 && !sees_lost(node))
            put({r.layout.out_of(call, node) + at, r.layout.in_of(call, r.node) + at, round_up(bytes, 16),
                 r.layout.weighed_of(call, r.node)},
                node, flag);
    }
    // Put the row that the block has written, at row_for of any node, before it met. One warp of the block calls it.
    __device__ void put_row(int node, int token, const std::byte* row, int64_t row_bytes, unsigned long long flag) const {
        put(row_of(node, token, row - base(), row_bytes), node, flag);
    }

    // One thread uses these words between ranks of a rail when one of them comes back.
    __device__ unsigned long long* returned(int node) const { return own_word(r.layout.returned_of(node)); }
    __device__ unsigned long long* resumed(int rank) const { return own_word(r.layout.resumed_of(rank)); }
    __device__ void tell_returned(int node, bool has) const { signal(r.layout.returned_of(r.node), has, node); }
    __device__ void tell_resumed(int node, int rank, unsigned long long next) const { signal(r.layout.resumed_of(rank), next, node); }

    // Clear the words of a node's rank that comes back, because it may repeat calls that it has sent. All threads of a block call it.
    __device__ void forget(int node) const {
#pragma unroll 1
        for (int turn = 0; turn < kTurns; ++turn) {
            if (threadIdx.x == 0) *own_word(r.layout.entered_of(turn, node)) = *own_word(r.layout.weighed_of(turn, node)) = 0;
#pragma unroll 1
            for (int token = threadIdx.x; token < r.layout.num_tokens; token += blockDim.x)
                *own_word(r.layout.arrived_of(turn, node, token)) = 0;
        }
        __syncthreads();
    }

    // Write the message of a refusal. One thread of the block that will put it calls this.
    __device__ void write_reason(int node, const GpuFailure& why) const {
        auto& reason = *reinterpret_cast<LowLatencyReason*>(message_for(node));
        reason.why = why;
        reason.text[0] = '\0';
    }

private:
    // Describes a put by offsets in symmetric memory.
    struct Put {
        int64_t from, to, bytes, word;
    };

    __device__ std::byte* base() const { return r.bases[r.index]; }
    __device__ unsigned long long* own_word(int64_t offset) const { return reinterpret_cast<unsigned long long*>(base() + offset); }
    __device__ void signal(int64_t offset, unsigned long long value, int node) const {
        nvshmemx_signal_op(reinterpret_cast<uint64_t*>(base() + offset), value, NVSHMEM_SIGNAL_SET, r.pes[node]);
    }
    // Returns to all threads of a warp the first one's answer, because each may read another mask.
    __device__ bool sees_lost(int node) const { return __shfl_sync(kFullWarp, is_lost(node), 0); }
    __device__ Put message_of(int node, int64_t bytes) const {
        return {r.layout.out_of(call, node), r.layout.in_of(call, r.node), round_up(bytes, 16), r.layout.entered_of(call, r.node)};
    }
    __device__ Put row_of(int node, int token, int64_t from, int64_t row_bytes) const {
        return {from, r.layout.inbox + r.layout.box_of(call, node, r.node) + token * row_bytes, row_bytes,
                r.layout.arrived_of(call, r.node, token)};
    }
    // One warp puts. Without bytes only the word goes. The fence covers everything that the block had written before it met.
    __device__ void put(const Put& what, int node, unsigned long long flag) const {
        fence_system();
        auto* const word = reinterpret_cast<uint64_t*>(base() + what.word);
        if (what.bytes != 0) {
            nvshmemx_putmem_signal_nbi_warp(base() + what.to, base() + what.from, what.bytes, word, flag, NVSHMEM_SIGNAL_SET, r.pes[node]);
        } else if (threadIdx.x % 32 == 0) {
            nvshmemx_signal_op(word, flag, NVSHMEM_SIGNAL_SET, r.pes[node]);
        }
    }
};

}  // namespace deepep_moe

// The kernels of a low-latency combine that put to other nodes share this: the words of a call, and the entry in this node. Sources include
// NVSHMEM's headers before this one.
#pragma once

#include "nvshmem/low_latency_rail.cuh"

namespace deepep_moe {

struct RailCombine {
    const RailPuts rail;
    const LowLatencyContext& c;
    const LowLatencyConfig& config;
    const LowLatencyCombineParams& p;
    const unsigned long long flag;  // this rank's flag in the call, with value 0
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

    __device__ RailCombine(const LowLatencyRailCombine& l, unsigned long long call)
        : rail(l.rail, call), c(l.rail.context), config(c.config), p(l.call), flag(p.what.flag(call, 0)) {}

    template <class T>
    __device__ const T* in_handle(int64_t offset) const {
        return reinterpret_cast<const T*>(p.handle + offset);
    }
    __device__ unsigned long long dispatch() const { return *in_handle<unsigned long long>(0); }
    __device__ bool has_failed() const {
        return *in_handle<unsigned long long>(LowLatencyHandleLayout(config).failed) == (dispatch() ^ c.failed);
    }
    // Returns the number of tokens of the rail's rank in `node`.
    __device__ int tokens_of(int node) const { return in_handle<int32_t>(LowLatencyHandleLayout(config).num_tokens)[rail.rank_in(node)]; }
    // Returns the ranks of this node that have rows of a token of that rank, as bits of their index.
    __device__ unsigned ranks_of(int node, int token) const {
        return in_handle<unsigned>(LowLatencyRailHandle(config, rail.r.num_nodes).in_ranks)[node * config.num_max_tokens + token];
    }

    __device__ unsigned long long own_word() const { return flag + LowLatencyWhat::value_in(dispatch()); }
    __device__ unsigned long long refusing_word() const {
        LowLatencyWhat what = p.what;
        what.is_refused = true;
        return what.flag(rail.call, 0);
    }
    __device__ GpuFailure failed_handle() const {
        return {kFailedHandle, c.rank, static_cast<int>(GpuPhase::kEntry), static_cast<long long>(dispatch()), 0};
    }

    // Enter the call in this node: thread r writes the entry at rank r. It may be done twice. One warp calls it.
    __device__ void enter_node(bool failed) const {
        const int to = rail.first_rank() + lane;
        if (lane == 0) *reinterpret_cast<unsigned long long*>(p.call) = rail.call;
        if (failed && lane == 0) report(c, kFailedHandle, c.rank, GpuPhase::kEntry, static_cast<long long>(dispatch()), 0);
        if (lane >= rail.r.ranks_per_node || is_masked(c, to)) return;
        if (failed) tell_reason(c, to, rail.call, failed_handle());
        store_relaxed(Turn(c, to, rail.call).entered(c.rank), failed ? refusing_word() : own_word());
    }
};

}  // namespace deepep_moe

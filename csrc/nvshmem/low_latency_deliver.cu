// A network for benchmarks with virtual nodes: puts what a kernel before it on the stream has posted, at the pace of a network card, so
// that the kernel's own time has no copies in it, as on a real network.
#include <nvshmem.h>
#include <nvshmemx.h>

#include "nvshmem/low_latency.h"
#include "nvshmem/low_latency_rail.cuh"

namespace deepep_moe {
namespace {

using Launch = LowLatencyRailDeliver;

// Messages first, then rows in the order of tokens. A row may be put once a card would have carried those before it.
__global__ void __launch_bounds__(tuning::kLowLatencyThreads, 2) rail_deliver(const __grid_constant__ Launch l) {
    const RailPuts rail(l.rail, *reinterpret_cast<const unsigned long long*>(l.call.call));
    const int64_t num_peers = l.rail.num_nodes - 1, num_tokens = l.rail.layout.num_tokens;
    const unsigned long long begin = now_ns();
    for (int64_t task = blockIdx.x; task < num_peers * (num_tokens + 1); task += gridDim.x) {
        const int64_t row = task - num_peers;
        if (row >= 0)
            while (now_ns() - begin < static_cast<unsigned long long>(l.call.ns_per_row * static_cast<float>(row + 1))) pause_ns(kPauseNs);
        __syncthreads();
        rail.deliver(rail.node_at(static_cast<int>(1 + task % num_peers)), row < 0 ? num_tokens : row / num_peers, l.call.row_bytes);
    }
}

}  // namespace

const char* launch_rail_deliver(const Launch& l, void* stream) noexcept {
    return try_launch<rail_deliver>("rail_deliver", l.num_blocks, 0, l, stream);
}

}  // namespace deepep_moe

// Set the flags of slots in a peer's inbox that a copy engine has filled. Runs on the stream behind the copy and waits for nothing.
#include "cuda/device/launch.cuh"
#include "cuda/device/sync.cuh"
#include "cuda/launch.h"

namespace deepep_moe {
namespace {

__global__ void announce(const __grid_constant__ GpuAnnounceParams p) {
    if (gave_up(p.context)) return;
    const Workspace theirs(p.context, p.peer);
    fence_system();
    for (int index = threadIdx.x * kChunkSlots; index < p.num_slots; index += blockDim.x * kChunkSlots)
        store_relaxed(theirs.arrived(p.context.rank, p.first_slot + index), p.context.state->sequence);
}

}  // namespace

void launch_announce(const GpuAnnounceParams& p, void* stream) { launch<announce>("announce", 1, 256, 0, p, stream); }

}  // namespace deepep_moe

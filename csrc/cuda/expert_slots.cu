// Copies of experts. The second kernel of a call; its plan has met all peers.
//
//   fetch     Each rank pushes its experts' weights into the peers' slots that hold copies of them.
//   return    Each rank reads the gradients of its experts' copies from the peers' slots, and adds them to its own, ranks ascending.
//
// All blocks do the same: task t goes to warp t modulo the number of warps. The last block to finish tells the peers, and waits until all
// of them have told this rank. So the peers' slots are full after a fetch, and free after a return.
#include "cuda/device/launch.cuh"
#include "cuda/device/ring.cuh"
#include "cuda/launch.h"

namespace deepep_moe {
namespace {

using Params = GpuExpertSlotsParams;
constexpr int kThreads = 512;  // of a block that adds gradients
constexpr int kBatch = 4;      // steps of a thread in flight
constexpr int kMaxCopies = kMaxGpuRanks * kMaxExpertSlots;
static_assert(kMaxCopies <= 256, "an entry is a byte");

// A warp's share of the work: `unit` of `tensor`, for the copy with number `copy`.
struct Task {
    int copy, tensor;
    int64_t unit;
};

class Copies {
public:
    // All threads of the block. Finds the copies of this rank's experts: none if a slot cannot be filled, which is reported.
    __device__ explicit Copies(const Params& p) : p_(p), rank_(p.context.rank), num_ranks_(p.context.config.num_ranks) {
        __shared__ int16_t experts[kMaxCopies];
        __shared__ uint8_t found[kMaxCopies];
        __shared__ int num_found;
        experts_ = experts, found_ = found;
        const int num_entries = num_ranks_ * p.num_slots;
        for (int i = threadIdx.x; i < num_entries; i += blockDim.x) experts[i] = static_cast<int16_t>(checked(i));
        __syncthreads();
        if (threadIdx.x < 32) {
            int count = 0;
            for (int first = 0; first < num_entries; first += 32) {
                const int entry = entry_at(first + static_cast<int>(threadIdx.x));
                const bool is_task = entry < num_entries && is_own(entry) && (!p.returns || is_first(entry));
                const unsigned tasks = __ballot_sync(kFullWarp, is_task);
                if (is_task) found[count + __popc(tasks & ((1u << threadIdx.x) - 1))] = static_cast<uint8_t>(entry);
                count += __popc(tasks);
            }
            if (threadIdx.x == 0) num_found = gave_up(p.context) ? 0 : count;
        }
        __syncthreads();
        count = num_found;
    }

    __device__ int slot_of(int copy) const { return found_[copy] % p_.num_slots; }
    __device__ int rank_of(int copy) const { return found_[copy] / p_.num_slots; }
    __device__ int local_expert(int copy) const { return experts_[found_[copy]] - rank_ * p_.num_local_experts; }

    // The slot of `rank` that holds the same expert; -1: none.
    __device__ int slot_in(int rank, int copy) const {
        for (int slot = 0; slot < p_.num_slots; ++slot)
            if (experts_[rank * p_.num_slots + slot] == experts_[found_[copy]]) return slot;
        return -1;
    }

    __device__ bool find(int64_t nth, Task& task) const {
        if (count == 0) return false;
        task = {static_cast<int>(nth % count), 0, nth / count};
        for (; task.tensor < p_.num_tensors; ++task.tensor) {
            if (task.unit < p_.tensors[task.tensor].num_units) return true;
            task.unit -= p_.tensors[task.tensor].num_units;
        }
        return false;
    }

    int count;  // of tasks for a unit: the copies, or in a return the experts that have copies

private:
    // The expert of an entry of `copies`.
    __device__ int checked(int entry) const {
        const int rank = entry / p_.num_slots, slot = entry % p_.num_slots, expert = p_.copies[entry];
        bool is_bad = expert < -1 || expert >= num_ranks_ * p_.num_local_experts || (expert >= 0 && expert / p_.num_local_experts == rank);
        for (int before = 0; before < slot && expert >= 0; ++before) is_bad |= p_.copies[entry - slot + before] == expert;
        if (is_bad) report(p_.context, kBadCopy, rank, GpuPhase::kExperts, slot, expert);
        return expert;
    }

    // The entries by turns of all ranks, the next one first, so that all links are busy; a return takes them in their order.
    __device__ int entry_at(int turn) const {
        return p_.returns || turn >= num_ranks_ * p_.num_slots
                   ? turn
                   : (rank_ + 1 + turn % num_ranks_) % num_ranks_ * p_.num_slots + turn / num_ranks_;
    }
    __device__ bool is_own(int entry) const { return experts_[entry] >= 0 && experts_[entry] / p_.num_local_experts == rank_; }
    __device__ bool is_first(int entry) const {
        for (int before = 0; before < entry; ++before)
            if (experts_[before] == experts_[entry]) return false;
        return true;
    }

    const Params& p_;
    const int rank_, num_ranks_;
    const int16_t* experts_;  // of all entries
    const uint8_t* found_;    // the entries of the tasks
};

// Calls run(task) for all tasks of this warp, of `num_warps` in each block.
template <class Run>
__device__ void for_tasks(const Copies& copies, int num_warps, const Run& run) {
    Task task;
    for (int64_t nth = threadIdx.x / 32 * gridDim.x + blockIdx.x; copies.find(nth, task); nth += num_warps * gridDim.x) run(task);
}

template <class Ring>
__device__ void fetch(const Params& p, const Copies& copies) {
    const GpuSlotLayout unit(p.unit, 0);
    Ring ring(p.ring, unit);
    const bool is_low = threadIdx.x % 32 == 0;
    const auto drain = [&](const RingRow& row) {  // the note has half of the address
        const auto low = static_cast<uint32_t>(__shfl_sync(kFullWarp, row.note, 0)),
                   high = static_cast<uint32_t>(__shfl_sync(kFullWarp, row.note, 1));
        ring.store(reinterpret_cast<std::byte*>(static_cast<uint64_t>(high) << 32 | low), row);
    };
    for_tasks(copies, p.ring.warps, [&](const Task& task) {
        const Params::Tensor& tensor = p.tensors[task.tensor];
        const int64_t bytes = tensor.num_units * p.unit, begin = task.unit * p.unit;
        const auto to = reinterpret_cast<uint64_t>(p.context.workspaces[copies.rank_of(task.copy)] + tensor.slots +
                                                   copies.slot_of(task.copy) * bytes + begin);
        const std::byte* from = tensor.home + copies.local_expert(task.copy) * bytes + begin;
        ring.add(from, nullptr, static_cast<int>(is_low ? to : to >> 32), drain);
    });
    ring.flush(drain);
    ring.template settle<0>();
}

// One warp adds a unit of the gradients of an expert's copies. The elements of a step are whole pieces of both dtypes.
template <class Home, class Slot>
__device__ void add(const Params& p, const Copies& copies, const Task& task) {
    constexpr int kStep = Home::kCount > Slot::kCount ? Home::kCount : Slot::kCount;
    constexpr int kHome = kStep / Home::kCount, kSlot = kStep / Slot::kCount;  // pieces of a step
    const Params::Tensor& tensor = p.tensors[task.tensor];
    const int num_steps = static_cast<int>(p.unit / kStep), lane = threadIdx.x % 32;
    const int64_t of_expert = tensor.num_units * num_steps, begin = task.unit * num_steps;
    uint4* home = pieces(tensor.home) + (copies.local_expert(task.copy) * of_expert + begin) * kHome;
    const int rank = lane, own_slot = rank < p.context.config.num_ranks && rank != p.context.rank ? copies.slot_in(rank, task.copy) : -1;
    const unsigned ranks = __ballot_sync(kFullWarp, own_slot >= 0);
    for (int first = lane; first - lane < num_steps; first += 32 * kBatch) {
        float sum[kBatch][kStep];
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
#pragma unroll
            for (int j = 0; j < kHome; ++j)
                if (first + 32 * i < num_steps) Home::load(home[(first + 32 * i) * kHome + j], sum[i] + j * Home::kCount);
#pragma unroll 1
        for (unsigned rest = ranks; rest != 0; rest &= rest - 1) {
            const int from = __ffs(rest) - 1, slot = __shfl_sync(kFullWarp, own_slot, from);
            const uint4* copy = pieces(p.context.workspaces[from] + tensor.slots) + (slot * of_expert + begin) * kSlot;
            uint4 raw[kBatch][kSlot];
#pragma unroll
            for (int i = 0; i < kBatch; ++i)
#pragma unroll
                for (int j = 0; j < kSlot; ++j)
                    if (first + 32 * i < num_steps) raw[i][j] = copy[(first + 32 * i) * kSlot + j];
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                if (first + 32 * i >= num_steps) continue;
#pragma unroll
                for (int j = 0; j < kSlot; ++j) {
                    float values[Slot::kCount];
                    Slot::load(raw[i][j], values);
#pragma unroll
                    for (int v = 0; v < Slot::kCount; ++v)
                        sum[i][j * Slot::kCount + v] = __fadd_rn(sum[i][j * Slot::kCount + v], values[v]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
#pragma unroll
            for (int j = 0; j < kHome; ++j)
                if (first + 32 * i < num_steps) home[(first + 32 * i) * kHome + j] = Home::store(sum[i] + j * Home::kCount);
    }
}

// The last block to finish tells the peers, and waits for them.
__device__ void finish(const Params& p) {
    const GpuContext& c = p.context;
    fence_system();
    if (!is_last_block(&c.state->num_told, gridDim.x)) return;
    const int peer = static_cast<int>(threadIdx.x);
    if (peer >= c.config.num_ranks || peer == c.rank || gave_up(c)) return;
    store_release(Workspace(c, peer).lanes_ready(c.rank), c.state->sequence);
    wait_flag(c, Workspace(c, c.rank).lanes_ready(peer), c.state->sequence, peer, GpuPhase::kExperts);
}

template <class Ring>
__global__ void __launch_bounds__(32 * tuning::kMaxRingWarps, 1) fetch_experts(const __grid_constant__ Params p) {
    if (!wait_for_plan(p.context, false)) return;
    const Copies copies(p);
    fetch<Ring>(p, copies);
    finish(p);
}

template <DType kHome, DType kSlot>
__global__ void __launch_bounds__(kThreads) return_gradients(const __grid_constant__ Params p) {
    if (!wait_for_plan(p.context, false)) return;
    const Copies copies(p);
    for_tasks(copies, kThreads / 32, [&](const Task& task) { add<Piece<kHome>, Piece<kSlot>>(p, copies, task); });
    finish(p);
}

}  // namespace

void launch_expert_slots(const GpuExpertSlotsParams& p, void* stream) {
    if (p.returns) {
        constexpr const char* kWhy = "gradients are not fp8";
        return with_dtype(p.home_dtype, kWhy, [&](auto home) {
            with_dtype(p.slot_dtype, kWhy, [&](auto slot) {
                launch<return_gradients<home.value, slot.value>>("return_gradients", p.num_blocks, kThreads, 0, p, stream);
            });
        });
    }
    const int threads = 32 * p.ring.warps;
    if (p.ring.stages == 0) return launch<fetch_experts<PlainRing>>("fetch_experts", p.num_blocks, threads, 0, p, stream);
    launch<fetch_experts<BulkRing>>("fetch_experts", p.num_blocks, threads, RingMemory::bytes(p.ring, GpuSlotLayout(p.unit, 0)), p, stream);
}

}  // namespace deepep_moe

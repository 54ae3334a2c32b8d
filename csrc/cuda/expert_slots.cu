// Moves copies of experts. This is the second kernel of a call; the first, its plan, has met all peers.
//
//   fetch     Each rank pushes its experts' weights into the peers' slots that hold copies of them.
//   return    Each rank reads the gradients of its experts' copies from the peers' slots. It adds them to its own, ranks ascending.
//
// All blocks do the same: task t goes to warp t modulo the number of warps. The last block to finish tells the peers, and waits until all
// of them have told this rank. So the peers' slots are full after a fetch, and free after a return.
#include "cuda/device/launch.cuh"
#include "cuda/device/ring.cuh"
#include "cuda/launch.h"

namespace deepep_moe {
namespace {

using Params = GpuExpertSlotsParams;
constexpr int kMostElements = 1024;  // gradients that a warp adds at a time
constexpr int kMaxCopies = kMaxGpuRanks * kMaxExpertSlots;
static_assert(kMaxCopies <= 256, "an entry is a byte");

// A warp moves one unit at a time: `unit` of `tensor`, for the copy with number `copy`.
struct Task {
    int copy, tensor;
    int64_t unit;
};

class Copies {
public:
    // Finds the copies of this rank's experts. A slot that cannot be filled is reported, and then there are no tasks. All threads call it.
    __device__ explicit Copies(const Params& p) : p_(p), rank_(p.context.rank), num_ranks_(p.context.config.num_ranks) {
        __shared__ int16_t experts[kMaxCopies];
        __shared__ uint8_t entries[kMaxCopies];
        __shared__ int num_found;
        experts_ = experts, entries_ = entries;
        const int num_entries = num_ranks_ * p.num_slots;
        for (int i = threadIdx.x; i < num_entries; i += blockDim.x) experts[i] = static_cast<int16_t>(checked(i));
        __syncthreads();
        if (threadIdx.x < 32) {
            int count = 0;
            for (int first = 0; first < num_entries; first += 32) {
                const int entry = entry_at(first + static_cast<int>(threadIdx.x));
                const bool is_task = entry < num_entries && is_own(entry) && (!p.returns || is_first(entry));
                const unsigned tasks = __ballot_sync(kFullWarp, is_task);
                if (is_task) entries[count + __popc(tasks & ((1u << threadIdx.x) - 1))] = static_cast<uint8_t>(entry);
                count += __popc(tasks);
            }
            if (threadIdx.x == 0) num_found = gave_up(p.context) ? 0 : count;
        }
        __syncthreads();
        count = num_found;
    }

    __device__ int slot_of(int copy) const { return entries_[copy] % p_.num_slots; }
    __device__ int rank_of(int copy) const { return entries_[copy] / p_.num_slots; }
    __device__ int local_expert(int copy) const { return experts_[entries_[copy]] - rank_ * p_.num_local_experts; }

    // Returns the slot of `rank` that holds the same expert, or -1.
    __device__ int slot_in(int rank, int copy) const {
        for (int slot = 0; slot < p_.num_slots; ++slot)
            if (experts_[rank * p_.num_slots + slot] == experts_[entries_[copy]]) return slot;
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

    int count;  // tasks for a unit: the copies, or in a return the experts that have copies

private:
    // Returns the expert of an entry of `copies`, and reports one that the slot cannot hold.
    __device__ int checked(int entry) const {
        const int rank = entry / p_.num_slots, slot = entry % p_.num_slots, expert = p_.copies[entry];
        bool is_bad = expert < -1 || expert >= num_ranks_ * p_.num_local_experts || (expert >= 0 && expert / p_.num_local_experts == rank);
        for (int before = 0; before < slot && expert >= 0; ++before) is_bad |= p_.copies[entry - slot + before] == expert;
        if (is_bad) report(p_.context, kBadCopy, rank, GpuPhase::kExperts, slot, expert);
        return expert;
    }

    // A fetch goes by turns over all ranks, the next one first, so that all links are busy. A return takes the entries in their order.
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
    const int16_t* experts_;  // the experts of all entries
    const uint8_t* entries_;  // the entries of the tasks
};

// Calls run(task) for all tasks of this warp, of `num_warps` in each block.
template <class Run>
__device__ void for_tasks(const Copies& copies, int num_warps, const Run& run) {
    Task task;
    for (int64_t nth = threadIdx.x / 32 * gridDim.x + blockIdx.x; copies.find(nth, task); nth += num_warps * gridDim.x) run(task);
}

// An address does not fit one note, so the first two threads of a row keep half of it each.
__device__ int half_of(const std::byte* address) {
    const auto word = reinterpret_cast<uint64_t>(address);
    return static_cast<int>(threadIdx.x % 32 == 0 ? word : word >> 32);
}
__device__ std::byte* address_in(const RingRow& row) {
    const auto low = static_cast<uint32_t>(__shfl_sync(kFullWarp, row.note, 0));
    const auto high = static_cast<uint32_t>(__shfl_sync(kFullWarp, row.note, 1));
    return reinterpret_cast<std::byte*>(static_cast<uint64_t>(high) << 32 | low);
}

template <class Ring>
__device__ void fetch(const Params& p, const Copies& copies) {
    Ring ring(p.ring, GpuSlotLayout(p.unit, 0));
    const auto drain = [&](const RingRow& row) { ring.store(address_in(row), row); };
    for_tasks(copies, p.ring.warps, [&](const Task& task) {
        const Params::Tensor& tensor = p.tensors[task.tensor];
        const int slot = copies.slot_of(task.copy), expert = copies.local_expert(task.copy);
        const std::byte* from = tensor.home + expert * tensor.home_stride + task.unit * p.unit;
        const std::byte* to =
            p.context.workspaces[copies.rank_of(task.copy)] + tensor.slots + (slot * tensor.num_units + task.unit) * p.unit;
        ring.add(from, nullptr, half_of(to), drain);
    });
    ring.flush(drain);
    ring.template settle<0>();
}

// Adds gradients of copies to those at home. A row of the ring holds a unit at home, its tail the same unit of a copy. Copies of one unit
// follow each other.
template <class Ring, class Home, class Slot>
__device__ void add(const Params& p, const Copies& copies) {
    constexpr int kStep = Home::kCount > Slot::kCount ? Home::kCount : Slot::kCount;  // elements: whole pieces of both
    constexpr int kHome = kStep / Home::kCount, kSlot = kStep / Slot::kCount,
                  kSteps = kMostElements / kStep / 32;  // pieces and steps of a thread
    enum : int { kIsFirst = 1, kIsLast = 2 };
    const int lane = static_cast<int>(threadIdx.x % 32), num_steps = static_cast<int>(p.unit / kStep);
    const int64_t home_bytes = p.unit / Home::kCount * 16, slot_bytes = p.unit / Slot::kCount * 16;
    Ring ring(p.ring, GpuSlotLayout(home_bytes, slot_bytes));
    float sum[kSteps][kStep];
    const auto drain = [&](const RingRow& row) {  // the third note: is the copy the unit's first, its last
        uint4* home = pieces(address_in(row));
        const int what = __shfl_sync(kFullWarp, row.note, 2);
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            const int step = lane + 32 * i;
            if (step >= num_steps) continue;
#pragma unroll
            for (int j = 0; j < kHome; ++j)
                if (what & kIsFirst) Home::load(pieces(row.row)[step * kHome + j], sum[i] + j * Home::kCount);
#pragma unroll
            for (int j = 0; j < kSlot; ++j) {
                float values[Slot::kCount];
                Slot::load(pieces(row.tail)[step * kSlot + j], values);
#pragma unroll
                for (int v = 0; v < Slot::kCount; ++v) sum[i][j * Slot::kCount + v] = __fadd_rn(sum[i][j * Slot::kCount + v], values[v]);
            }
#pragma unroll
            for (int j = 0; j < kHome; ++j)
                if (what & kIsLast) home[step * kHome + j] = Home::store(sum[i] + j * Home::kCount);
        }
    };
    for_tasks(copies, p.ring.warps, [&](const Task& task) {
        const Params::Tensor& tensor = p.tensors[task.tensor];
        std::byte* home = tensor.home + copies.local_expert(task.copy) * tensor.home_stride + task.unit * home_bytes;
        const int own_slot = lane < p.context.config.num_ranks && lane != p.context.rank ? copies.slot_in(lane, task.copy) : -1;
        const unsigned ranks = __ballot_sync(kFullWarp, own_slot >= 0);
#pragma unroll 1
        for (unsigned rest = ranks; rest != 0; rest &= rest - 1) {
            const int from = __ffs(rest) - 1, slot = __shfl_sync(kFullWarp, own_slot, from);
            const int what = (rest == ranks ? kIsFirst : 0) | ((rest & (rest - 1)) == 0 ? kIsLast : 0);
            const std::byte* copy = p.context.workspaces[from] + tensor.slots + (slot * tensor.num_units + task.unit) * slot_bytes;
            ring.add(home, copy, lane == 2 ? what : half_of(home), drain);
        }
    });
    ring.flush(drain);
    ring.template settle<0>();
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
    fetch<Ring>(p, Copies(p));
    finish(p);
}

template <class Ring, DType kHome, DType kSlot>
__global__ void __launch_bounds__(32 * tuning::kMaxRingWarps, 1) return_gradients(const __grid_constant__ Params p) {
    if (!wait_for_plan(p.context, false)) return;
    fence_bulk_copies();  // bulk copies read what the peers wrote before they met this rank
    add<Ring, Piece<kHome>, Piece<kSlot>>(p, Copies(p));
    finish(p);
}

// Launches kKernel<BulkRing>, or where the ring has no stages kKernel<PlainRing>.
template <auto kBulk, auto kPlain>
void launch_with_ring(const char* name, const GpuExpertSlotsParams& p, const GpuSlotLayout& row, void* stream) {
    const int threads = 32 * p.ring.warps;
    if (p.ring.stages == 0) return launch<kPlain>(name, p.num_blocks, threads, 0, p, stream);
    launch<kBulk>(name, p.num_blocks, threads, RingMemory::bytes(p.ring, row), p, stream);
}

}  // namespace

void launch_expert_slots(const GpuExpertSlotsParams& p, void* stream) {
    if (!p.returns)
        return launch_with_ring<fetch_experts<BulkRing>, fetch_experts<PlainRing>>("fetch_experts", p, GpuSlotLayout(p.unit, 0), stream);
    const GpuSlotLayout row(p.unit * element_bytes(p.home_dtype), p.unit * element_bytes(p.slot_dtype));
    with_dtype(p.slot_dtype, "gradients are not fp8", [&](auto slot) {
        const auto launch_for = [&](auto home) {
            launch_with_ring<return_gradients<BulkRing, home.value, slot.value>, return_gradients<PlainRing, home.value, slot.value>>(
                "return_gradients", p, row, stream);
        };
        if (p.home_dtype == DType::kFloat32) return launch_for(std::integral_constant<DType, DType::kFloat32>{});
        launch_for(slot);
    });
}

}  // namespace deepep_moe

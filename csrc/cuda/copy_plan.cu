// Plans copies of hot experts and rewrites top-k entries, in one kernel. deepep_moe/reference/copies.py defines it, and serves CPUs. A slot
// is a number below num_ranks * num_slots, the slots of all ranks in order.
//
//   Every block makes the same plan: a warp makes the candidate of one threshold, and the best stays. So no block waits for another.
//
//   Each block then rewrites its part of topk_idx. A row's copy depends on its number among its expert's rows. So the block counts the
//   entries before its part whose experts have copies, or, where these are fewer, the others. Ballots number those of its part, so the
//   order is the same in every run.
#include <algorithm>
#include <string>

#include "cuda/device/launch.cuh"
#include "cuda/device/sync.cuh"
#include "cuda/driver.h"
#include "cuda/launch.h"

namespace deepep_moe {
namespace {

constexpr int kCopyThresholds = 32;
constexpr int kWarps = kCopyThresholds, kThreads = 32 * kWarps;
constexpr int kMostBlocks = 64;
constexpr int kLoads = 8;  // loads that a thread has in flight

__device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }

// Holds the largest of some values, and its index.
struct Largest {
    int value, index;
};

// Scores a plan. Lower is better.
struct CopyScore {
    int64_t value;  // the objective, or kMisfit + the largest load if the plan does not fit
    int num_copies;

    static constexpr int64_t kMisfit = int64_t{1} << 60;
    __device__ bool fits() const { return value < kMisfit; }
    __device__ bool is_better_than(const CopyScore& other) const {
        return value != other.value ? value < other.value : num_copies < other.num_copies;
    }
};

// Returns the score of a plan with this largest load, in which a rank sends or gets at most `most_moves` copies.
__device__ CopyScore copy_score(const CopyPlanParams& p, int load, int most_moves, int num_copies) {
    return {p.capacity >= 0 && load > p.capacity ? CopyScore::kMisfit + load : load + int64_t{p.cost} * most_moves, num_copies};
}

// Holds a plan while it is made.
struct CopyCandidate {
    int32_t *copies, *rows;       // [all_slots]
    int32_t* left;                // [num_experts] rows that stay at home
    int32_t *loads, *sent, *got;  // [num_ranks] rows of the rank, copies that it sends, copies that it gets

    static DEEPEP_MOE_HD int words(const CopyPlanParams& p) { return 2 * p.all_slots() + p.num_experts + 3 * p.num_ranks; }
    DEEPEP_MOE_HD CopyCandidate(const CopyPlanParams& p, int32_t* memory)
        : copies(memory),
          rows(copies + p.all_slots()),
          left(rows + p.all_slots()),
          loads(left + p.num_experts),
          sent(loads + p.num_ranks),
          got(sent + p.num_ranks) {}
};

// Returns the i-th threshold for these loads without copies.
__device__ int copy_threshold(const CopyPlanParams& p, const int32_t* loads, int i) {
    unsigned total = 0;
    int top = 0;
    for (int rank = 0; rank < p.num_ranks; ++rank) {
        total += static_cast<unsigned>(loads[rank]);
        if (loads[rank] > top) top = loads[rank];
    }
    const int mean = static_cast<int>((total + p.num_ranks - 1) / static_cast<unsigned>(p.num_ranks));
    if (p.capacity >= 0 && p.capacity < top) top = p.capacity > mean ? p.capacity : mean;
    return mean + static_cast<int>(int64_t{i} * (top - mean) / kCopyThresholds);
}

// Returns to all threads of a warp the largest of value(0) to value(count - 1), which are not negative, and its lowest index.
template <class Value>
__device__ Largest largest_of(int count, const Value& value) {
    const int lane = threadIdx.x % 32;
    int most = 0, at = INT32_MAX;
    for (int i = lane; i < count; i += 32) {
        const int other = value(i);
        if (i == lane || other > most) most = other, at = i;
    }
    const unsigned top = __reduce_max_sync(kFullWarp, static_cast<unsigned>(most));
    const unsigned index = __reduce_min_sync(kFullWarp, static_cast<unsigned>(most) == top ? static_cast<unsigned>(at) : UINT32_MAX);
    return {static_cast<int>(top), static_cast<int>(index)};
}

// Makes a plan as `fill` of the reference does, or without `fills` as `spread` does, from the rows of each expert and each rank's load
// without copies. One warp calls it.
__device__ CopyScore make_copies(const CopyPlanParams& p, const CopyCandidate& c, const int32_t* num_rows, const int32_t* loads,
                                 int threshold, bool fills) {
    const int lane = threadIdx.x % 32;
    for (int slot = lane; slot < p.all_slots(); slot += 32) c.copies[slot] = -1, c.rows[slot] = 0;
    for (int expert = lane; expert < p.num_experts; expert += 32) c.left[expert] = num_rows[expert];
    for (int rank = lane; rank < p.num_ranks; rank += 32) c.loads[rank] = loads[rank], c.sent[rank] = c.got[rank] = 0;
    __syncwarp();
    const int num_local = p.num_local(), least = fills || p.cost < 1 ? 1 : p.cost;
    const auto above_zero = [](int value) { return value > 0 ? value : 0; };
    const auto has_slot = [&](int rank) { return c.got[rank] < p.num_slots; };
    uint64_t gives_no_more = 0;  // bit r: rank r has no expert left that is worth a copy
    int num_copies = 0;
    Largest excess{}, room{};  // the donor's excess and the receiver's room
    while (true) {
        const bool is_filling = fills && room.value > 0 && has_slot(room.index);
        if (!is_filling) {
            excess = largest_of(p.num_ranks, [&](int r) { return gives_no_more >> r & 1 ? 0 : above_zero(c.loads[r] - threshold); });
            room = largest_of(p.num_ranks, [&](int r) { return has_slot(r) ? above_zero(threshold - c.loads[r]) : 0; });
            if (smaller(excess.value, room.value) < least) break;
        }
        const int donor = excess.index, first = donor * num_local;
        const Largest left = largest_of(num_local, [&](int i) { return above_zero(c.left[first + i]); });
        if (left.value < least) {
            gives_no_more |= uint64_t{1} << donor;
            room.value = 0;
            continue;
        }
        const int taken = smaller(smaller(left.value, room.value), fills ? room.value : excess.value);
        if (lane == 0) {
            const int slot = room.index * p.num_slots + c.got[room.index]++;
            c.copies[slot] = first + left.index, c.rows[slot] = taken;
            c.left[first + left.index] -= taken, c.loads[donor] -= taken, c.loads[room.index] += taken;
            ++c.sent[donor];
        }
        __syncwarp();
        room.value -= taken;
        ++num_copies;
    }
    const int load = largest_of(p.num_ranks, [&](int r) { return above_zero(c.loads[r]); }).value;
    const int moves = largest_of(p.num_ranks, [&](int r) { return c.sent[r] > c.got[r] ? c.sent[r] : c.got[r]; }).value;
    return copy_score(p, load, moves, num_copies);
}

// Says to which copies the rows of a source rank go. An expert's rows fill its first copy, then the next, and the rest goes home.
struct CopyShares {
    int32_t* first;  // [num_experts] the slot of the expert's first copy, or -1
    int32_t* next;   // [all_slots] the slot of the next copy of the same expert, or -1
    int32_t* ends;   // [all_slots] how many of the source rank's rows of the expert this copy and those before take

    __device__ int target(const CopyPlanParams& p, int64_t expert, int row) const {
        int slot = first[expert];
        while (slot >= 0 && row >= ends[slot]) slot = next[slot];
        return slot >= 0 ? p.physical_slot(slot) : p.physical_home(static_cast<int>(expert));
    }
};

// Set the shares of an expert. The rows that copies take are subtracted from the counts `left` [num_ranks, num_experts].
__device__ void share_rows(const CopyPlanParams& p, const int32_t* copies, const int32_t* rows, int expert, int32_t* left,
                           const CopyShares& shares) {
    const int home = expert / p.num_local();
    int32_t* link = shares.first + expert;
    int end = 0;
    for (int slot = 0; slot < p.all_slots(); ++slot) {
        if (copies[slot] != expert) continue;
        int quota = rows[slot];
        const auto take_from = [&](int source) {
            int32_t& here = left[source * p.num_experts + expert];
            const int taken = smaller(quota, here);
            here -= taken, quota -= taken;
            if (source == p.rank) end += taken;
        };
        for (int step = 0, source = slot / p.num_slots; step < p.num_ranks && quota > 0; ++step) {
            if (source != home) take_from(source);
            source = source + 1 < p.num_ranks ? source + 1 : 0;
        }
        take_from(home);
        *link = slot, link = shares.next + slot;
        shares.ends[slot] = end;
    }
    *link = -1;
}

// The shared memory of a block. Once the plan is made, `left` and `counts_of_warps` take the place of the candidates.
struct PlanMemory {
    CopyScore* scores;  // [kWarps]
    int32_t *num_rows, *loads, *copies, *rows;
    CopyShares shares;
    int32_t* counts_before;  // [all_slots] for each first copy, its expert's rows in the entries before this block's, or from there on
    int32_t* candidates;
    int32_t* left;             // [num_ranks, num_experts]
    int32_t* counts_of_warps;  // [kWarps, all_slots] the same rows in each warp's part, later in all entries before that part

    __device__ PlanMemory(const CopyPlanParams& p, std::byte* memory) : scores(reinterpret_cast<CopyScore*>(memory)) {
        const int slots = p.all_slots(), experts = p.num_experts;
        num_rows = reinterpret_cast<int32_t*>(scores + kWarps), loads = num_rows + experts;
        copies = loads + p.num_ranks, rows = copies + slots;
        shares = {rows + slots, rows + slots + experts, rows + 2 * slots + experts};
        counts_before = shares.ends + slots;
        candidates = left = counts_before + slots;
        counts_of_warps = left + p.num_ranks * experts;
    }
    __device__ CopyCandidate candidate(const CopyPlanParams& p, int warp) const { return {p, candidates + warp * CopyCandidate::words(p)}; }
    static int64_t bytes(const CopyPlanParams& p) {
        const int slots = p.all_slots(), planning = kWarps * CopyCandidate::words(p),
                  rewriting = p.num_ranks * p.num_experts + kWarps * slots;
        return kWarps * sizeof(CopyScore) + 4 * (2 * p.num_experts + p.num_ranks + 5 * slots + std::max(planning, rewriting));
    }
};

__device__ void sum_rows(const CopyPlanParams& p, const PlanMemory& m) {
    for (int rank = threadIdx.x; rank < p.num_ranks; rank += kThreads) m.loads[rank] = 0;
    for (int slot = threadIdx.x; slot < p.all_slots(); slot += kThreads) m.copies[slot] = -1, m.rows[slot] = 0;
    __syncthreads();
    for (int expert = threadIdx.x; expert < p.num_experts; expert += kThreads) {
        int sum = 0;
#pragma unroll 8
        for (int source = 0; source < p.num_ranks; ++source) sum += p.counts[source * p.num_experts + expert];
        m.num_rows[expert] = sum;
        atomicAdd(m.loads + expert / p.num_local(), sum);
    }
    __syncthreads();
}

// Returns to all threads of a warp the first candidate with the best score.
__device__ int best_of(const CopyScore* scores) {
    const CopyScore score = scores[threadIdx.x % 32];
    const auto is_least = [](bool may_be, unsigned value) {
        const unsigned least = __reduce_min_sync(kFullWarp, may_be ? value : UINT32_MAX);
        return may_be && value == least;
    };
    bool is_best = is_least(true, static_cast<unsigned>(score.value >> 32));
    is_best = is_least(is_best, static_cast<unsigned>(score.value));
    is_best = is_least(is_best, static_cast<unsigned>(score.num_copies));
    return __ffs(__ballot_sync(kFullWarp, is_best)) - 1;
}

// Set copies and rows. Returns whether there are copies.
__device__ bool choose_copies(const CopyPlanParams& p, const PlanMemory& m) {
    const int warp = threadIdx.x / 32, threshold = copy_threshold(p, m.loads, warp);
    CopyScore best = copy_score(p, largest_of(p.num_ranks, [&](int rank) { return m.loads[rank]; }).value, 0, 0);
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {
        const CopyScore score = make_copies(p, m.candidate(p, warp), m.num_rows, m.loads, threshold, pass == 1);
        if (threadIdx.x % 32 == 0) m.scores[warp] = score;
        __syncthreads();
        const int winner = best_of(m.scores);
        if (m.scores[winner].is_better_than(best)) {
            best = m.scores[winner];
            const CopyCandidate c = m.candidate(p, winner);
            for (int slot = threadIdx.x; slot < p.all_slots(); slot += kThreads)
                m.copies[slot] = c.copies[slot], m.rows[slot] = c.rows[slot];
        }
        __syncthreads();
        if (best.fits()) break;
    }
    return best.num_copies > 0;
}

__device__ void share_all_rows(const CopyPlanParams& p, const PlanMemory& m) {
    for (int i = threadIdx.x; i < p.num_ranks * p.num_experts; i += kThreads) m.left[i] = p.counts[i];
    for (int i = threadIdx.x; i < kWarps * p.all_slots(); i += kThreads) m.counts_of_warps[i] = 0;
    for (int slot = threadIdx.x; slot < p.all_slots(); slot += kThreads) m.counts_before[slot] = 0;
    __syncthreads();
    for (int expert = threadIdx.x; expert < p.num_experts; expert += kThreads) share_rows(p, m.copies, m.rows, expert, m.left, m.shares);
    __syncthreads();
}

// Rewrites a block's part of topk_idx.
template <class Index>
struct Rewriting {
    const CopyPlanParams& p;
    const PlanMemory& m;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t warp_entries = divide_up(p.num_entries, int64_t{32} * kWarps * gridDim.x) * 32;
    const int64_t block_begin = blockIdx.x * kWarps * warp_entries, begin = block_begin + warp * warp_entries;
    const int64_t end = begin + warp_entries < p.num_entries ? begin + warp_entries : p.num_entries;
    int32_t* const own_counts = m.counts_of_warps + warp * p.all_slots();

    // Returns the entry at `at`, or -1 from `end` on.
    __device__ Index entry(int64_t at, int64_t end) const { return at < end ? static_cast<const Index*>(p.topk_idx)[at] : -1; }
    __device__ bool is_expert(Index value) const { return value >= 0 && value < p.num_experts; }
    // Returns the expert's first copy, whose number indexes the counters, or -1 if it has no copy.
    __device__ int counter_of(Index value) const { return is_expert(value) ? m.shares.first[value] : -1; }

    // Returns how many threads before this one have the same counter. All threads of a warp call it.
    __device__ int count(int32_t* counts, int counter) const {
        if (!__any_sync(kFullWarp, counter >= 0)) return 0;
        const unsigned same = __match_any_sync(kFullWarp, counter), before = same & ((1u << lane) - 1);
        if (counter >= 0 && before == 0) atomicAdd(counts + counter, __popc(same));
        return __popc(before);
    }

    __device__ void count_rows() const {
        const bool is_late = 2 * block_begin > p.num_entries;
        const int64_t last = is_late ? p.num_entries : block_begin;
        for (int64_t first = (is_late ? block_begin : 0) + threadIdx.x; first < last; first += kThreads * kLoads) {
            Index values[kLoads];
#pragma unroll
            for (int i = 0; i < kLoads; ++i) values[i] = entry(first + i * kThreads, last);
#pragma unroll
            for (int i = 0; i < kLoads; ++i)
                if (const int counter = counter_of(values[i]); counter >= 0) atomicAdd(m.counts_before + counter, 1);
        }
        for (int64_t first = begin; first < end; first += 32) count(own_counts, counter_of(entry(first + lane, end)));
        __syncthreads();
        for (int slot = warp; slot < p.all_slots(); slot += kWarps) {
            int32_t& counts = m.counts_of_warps[lane * p.all_slots() + slot];
            const int here = counts, expert = m.copies[slot], counted = m.counts_before[slot];
            const int before = is_late && expert >= 0 ? p.counts[p.rank * p.num_experts + expert] - counted : counted;
            counts = before + prefix_sum(here) - here;
        }
        __syncthreads();
    }

    __device__ void write(bool has_copies) const {
        for (int64_t first = begin; first < end; first += 32) {
            const Index value = entry(first + lane, end);
            const int counter = has_copies ? counter_of(value) : -1;
            int row = counter >= 0 ? own_counts[counter] : 0;
            __syncwarp();
            row += count(own_counts, counter);
            __syncwarp();
            if (first + lane >= end) continue;
            const int target = !is_expert(value) ? p.num_physical() : has_copies ? m.shares.target(p, value, row) : p.physical_home(value);
            static_cast<Index*>(p.physical_topk_idx)[first + lane] = value == -1 ? -1 : target;
        }
    }
};

__global__ void __launch_bounds__(kThreads) plan_copies(const __grid_constant__ CopyPlanParams p) {
    const PlanMemory m(p, shared_memory<std::byte>());
    sum_rows(p, m);
    const bool has_copies = choose_copies(p, m);
    if (blockIdx.x == 0)
        for (int slot = threadIdx.x; slot < p.all_slots(); slot += kThreads) p.copies[slot] = m.copies[slot], p.rows[slot] = m.rows[slot];
    if (has_copies) share_all_rows(p, m);
    const auto rewrite = [&](const auto& rewriting) {
        if (has_copies) rewriting.count_rows();
        rewriting.write(has_copies);
    };
    if (p.is_int64)
        rewrite(Rewriting<int64_t>{p, m});
    else
        rewrite(Rewriting<int32_t>{p, m});
}

}  // namespace

void launch_plan_copies(const CopyPlanParams& p, void* stream) {
    const int64_t bytes = PlanMemory::bytes(p), blocks = std::clamp<int64_t>(divide_up(p.num_entries, int64_t{kThreads}), 1, kMostBlocks);
    const int most = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    if (bytes > most - kStaticSharedBytes)
        throw std::invalid_argument(std::to_string(p.num_slots) + " slots on each of " + std::to_string(p.num_ranks) + " ranks with " +
                                    std::to_string(p.num_experts) + " experts need " + std::to_string(bytes) +
                                    " bytes of shared memory, and this GPU has " + std::to_string(most) + "; use fewer slots");
    launch<plan_copies>("plan_copies", static_cast<int>(blocks), kThreads, bytes, p, stream);
}

}  // namespace deepep_moe

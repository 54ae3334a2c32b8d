// Plans copies of hot experts and rewrites top-k entries, in one kernel. It shares the arithmetic of common/copy_plan.h with the CPU.
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

constexpr int kWarps = kCopyThresholds, kThreads = 32 * kWarps;
constexpr int kMostBlocks = 64;
constexpr int kLoads = 8;  // loads that a thread has in flight

struct WarpTeam {
    const int lane = threadIdx.x % 32;

    template <class Value>
    __device__ Largest largest(int count, const Value& value) const {
        int most = 0, at = INT32_MAX;
        for (int i = lane; i < count; i += 32) {
            const int other = value(i);
            if (i == lane || other > most) most = other, at = i;
        }
        const unsigned top = __reduce_max_sync(kFullWarp, static_cast<unsigned>(most));
        const unsigned index = __reduce_min_sync(kFullWarp, static_cast<unsigned>(most) == top ? static_cast<unsigned>(at) : UINT32_MAX);
        return {static_cast<int>(top), static_cast<int>(index)};
    }
    template <class Work>
    __device__ void each(int count, const Work& work) const {
        for (int i = lane; i < count; i += 32) work(i);
        __syncwarp();
    }
    template <class Work>
    __device__ void once(const Work& work) const {
        if (lane == 0) work();
        __syncwarp();
    }
};

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
    const WarpTeam team;
    const int warp = threadIdx.x / 32, threshold = copy_threshold(p, m.loads, warp);
    CopyScore best = copy_score(p, team.largest(p.num_ranks, [&](int rank) { return m.loads[rank]; }).value, 0, 0);
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {
        const CopyScore score = make_copies(team, p, m.candidate(p, warp), m.num_rows, m.loads, threshold, pass == 1);
        if (team.lane == 0) m.scores[warp] = score;
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

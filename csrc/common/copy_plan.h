// CPU and GPU plan copies of hot experts, and find physical experts of top-k entries, by this arithmetic. deepep_moe/reference/copies.py
// defines it. A slot is a number below num_ranks * num_slots, the slots of all ranks in order.
#pragma once

#include <cstdint>

#include "common/types.h"

// Marks functions that run on the GPU in kernels, and on the CPU in the CPU library.
#if defined(__CUDACC__)
#define DEEPEP_MOE_TEAM __device__
#else
#define DEEPEP_MOE_TEAM
#endif

namespace deepep_moe {

constexpr int kCopyThresholds = 32;

struct CopyPlanParams {
    int num_ranks, num_experts, num_slots, rank;
    int cost, capacity;       // both in rows; -1 means no capacity
    int64_t num_entries;      // num_tokens * num_topk
    bool is_int64;            // topk_idx is int64
    const int32_t* counts;    // [num_ranks, num_experts]
    const void* topk_idx;     // [num_entries] int64 or int32
    int32_t *copies, *rows;   // [num_ranks, num_slots], out
    void* physical_topk_idx;  // [num_entries], out

    DEEPEP_MOE_HD int num_local() const { return num_experts / num_ranks; }
    DEEPEP_MOE_HD int all_slots() const { return num_ranks * num_slots; }
    DEEPEP_MOE_HD int num_physical() const { return num_experts + all_slots(); }
    DEEPEP_MOE_HD int physical_home(int expert) const { return expert + expert / num_local() * num_slots; }
    DEEPEP_MOE_HD int physical_slot(int slot) const { return slot + (slot / num_slots + 1) * num_local(); }
};

constexpr DEEPEP_MOE_HD int smaller(int a, int b) { return a < b ? a : b; }

// Holds the largest of some values, and its index.
struct Largest {
    int value, index;
};

// Scores a plan. Lower is better.
struct CopyScore {
    int64_t value;  // the objective, or kMisfit + the largest load if the plan does not fit
    int num_copies;

    static constexpr int64_t kMisfit = int64_t{1} << 60;
    DEEPEP_MOE_HD bool fits() const { return value < kMisfit; }
    DEEPEP_MOE_HD bool is_better_than(const CopyScore& other) const {
        return value != other.value ? value < other.value : num_copies < other.num_copies;
    }
};

// Returns the score of a plan with this largest load, in which a rank sends or gets at most `most_moves` copies.
DEEPEP_MOE_HD inline CopyScore copy_score(const CopyPlanParams& p, int load, int most_moves, int num_copies) {
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
DEEPEP_MOE_HD inline int copy_threshold(const CopyPlanParams& p, const int32_t* loads, int i) {
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

// A team is the threads that make a plan together. `largest(count, value)` returns to each thread the largest of value(0) ..., which are
// not negative, and its lowest index. `each(count, work)` divides the indices among the threads. `once(work)` runs in one of them. Both end
// when all threads see what was written.
//
// Makes a plan as `fill` of the reference does, or without `fills` as `spread` does, from the rows of each expert and each rank's load
// without copies.
template <class Team>
DEEPEP_MOE_TEAM CopyScore make_copies(const Team& team, const CopyPlanParams& p, const CopyCandidate& c, const int32_t* num_rows,
                                      const int32_t* loads, int threshold, bool fills) {
    team.each(p.all_slots(), [&](int slot) { c.copies[slot] = -1, c.rows[slot] = 0; });
    team.each(p.num_experts, [&](int expert) { c.left[expert] = num_rows[expert]; });
    team.each(p.num_ranks, [&](int rank) { c.loads[rank] = loads[rank], c.sent[rank] = c.got[rank] = 0; });
    const int num_local = p.num_local(), least = fills || p.cost < 1 ? 1 : p.cost;
    const auto above_zero = [](int value) { return value > 0 ? value : 0; };
    const auto has_slot = [&](int rank) { return c.got[rank] < p.num_slots; };
    uint64_t gives_no_more = 0;  // bit r: rank r has no expert left that is worth a copy
    int num_copies = 0;
    Largest excess{}, room{};  // the donor's excess and the receiver's room
    while (true) {
        const bool is_filling = fills && room.value > 0 && has_slot(room.index);
        if (!is_filling) {
            excess = team.largest(p.num_ranks, [&](int r) { return gives_no_more >> r & 1 ? 0 : above_zero(c.loads[r] - threshold); });
            room = team.largest(p.num_ranks, [&](int r) { return has_slot(r) ? above_zero(threshold - c.loads[r]) : 0; });
            if (smaller(excess.value, room.value) < least) break;
        }
        const int donor = excess.index, first = donor * num_local;
        const Largest left = team.largest(num_local, [&](int i) { return above_zero(c.left[first + i]); });
        if (left.value < least) {
            gives_no_more |= uint64_t{1} << donor;
            room.value = 0;
            continue;
        }
        const int taken = smaller(smaller(left.value, room.value), fills ? room.value : excess.value);
        team.once([&] {
            const int slot = room.index * p.num_slots + c.got[room.index]++;
            c.copies[slot] = first + left.index, c.rows[slot] = taken;
            c.left[first + left.index] -= taken, c.loads[donor] -= taken, c.loads[room.index] += taken;
            ++c.sent[donor];
        });
        room.value -= taken;
        ++num_copies;
    }
    const int load = team.largest(p.num_ranks, [&](int r) { return above_zero(c.loads[r]); }).value;
    const int moves = team.largest(p.num_ranks, [&](int r) { return c.sent[r] > c.got[r] ? c.sent[r] : c.got[r]; }).value;
    return copy_score(p, load, moves, num_copies);
}

// Plans copies on the CPU. Throws std::invalid_argument for negative counts, or counts whose sum is 2^31 or more.
void plan_copies_on_cpu(const CopyPlanParams& params);

// Says to which copies the rows of a source rank go. An expert's rows fill its first copy, then the next, and the rest goes home.
struct CopyShares {
    int32_t* first;  // [num_experts] the slot of the expert's first copy, or -1
    int32_t* next;   // [all_slots] the slot of the next copy of the same expert, or -1
    int32_t* ends;   // [all_slots] how many of the source rank's rows of the expert this copy and those before take

    DEEPEP_MOE_HD int target(const CopyPlanParams& p, int64_t expert, int row) const {
        int slot = first[expert];
        while (slot >= 0 && row >= ends[slot]) slot = next[slot];
        return slot >= 0 ? p.physical_slot(slot) : p.physical_home(static_cast<int>(expert));
    }
};

// Set the shares of an expert. The rows that copies take are subtracted from the counts `left` [num_ranks, num_experts].
DEEPEP_MOE_HD inline void share_rows(const CopyPlanParams& p, const int32_t* copies, const int32_t* rows, int expert, int32_t* left,
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

}  // namespace deepep_moe

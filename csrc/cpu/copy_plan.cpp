#include "common/copy_plan.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

namespace deepep_moe {
namespace {

struct Alone {
    template <class Value>
    Largest largest(int count, const Value& value) const {
        Largest result{value(0), 0};
        for (int i = 1; i < count; ++i) {
            const int other = value(i);
            if (other > result.value) result = {other, i};
        }
        return result;
    }
    template <class Work>
    void each(int count, const Work& work) const {
        for (int i = 0; i < count; ++i) work(i);
    }
    template <class Work>
    void once(const Work& work) const {
        work();
    }
};

// Write the plan's copies and rows, having checked the counts.
void choose_copies(const CopyPlanParams& p) {
    std::vector<int32_t> num_rows(p.num_experts), loads(p.num_ranks), memory(CopyCandidate::words(p));
    int64_t total = 0;
    for (int i = 0; i < p.num_ranks * p.num_experts; ++i) {
        const int expert = i % p.num_experts;
        total += p.counts[i];
        if (p.counts[i] < 0 || total > std::numeric_limits<int32_t>::max())
            throw std::invalid_argument("counts[" + std::to_string(i / p.num_experts) + "][" + std::to_string(expert) + "] is " +
                                        std::to_string(p.counts[i]) + "; counts must be at least 0, with a sum below 2^31");
        num_rows[expert] += p.counts[i];
        loads[expert / p.num_local()] += p.counts[i];
    }
    std::fill_n(p.copies, p.all_slots(), -1), std::fill_n(p.rows, p.all_slots(), 0);
    CopyScore best = copy_score(p, *std::max_element(loads.begin(), loads.end()), 0, 0);
    const CopyCandidate candidate(p, memory.data());
    for (const bool fills : {false, true}) {
        for (int i = 0; i < kCopyThresholds; ++i) {
            const CopyScore score =
                make_copies(Alone(), p, candidate, num_rows.data(), loads.data(), copy_threshold(p, loads.data(), i), fills);
            if (!score.is_better_than(best)) continue;
            best = score;
            std::copy_n(candidate.copies, p.all_slots(), p.copies), std::copy_n(candidate.rows, p.all_slots(), p.rows);
        }
        if (best.fits()) return;
    }
}

template <class Index>
void write_physical(const CopyPlanParams& p) {
    std::vector<int32_t> left(p.counts, p.counts + p.num_ranks * p.num_experts), memory(p.num_experts + 2 * p.all_slots()),
        seen(p.num_experts);
    const CopyShares shares{memory.data(), memory.data() + p.num_experts, memory.data() + p.num_experts + p.all_slots()};
    for (int expert = 0; expert < p.num_experts; ++expert) share_rows(p, p.copies, p.rows, expert, left.data(), shares);
    const auto* from = static_cast<const Index*>(p.topk_idx);
    auto* to = static_cast<Index*>(p.physical_topk_idx);
    for (int64_t i = 0; i < p.num_entries; ++i) {
        const Index expert = from[i];
        to[i] = expert == -1 ? -1 : expert < 0 || expert >= p.num_experts ? p.num_physical() : shares.target(p, expert, seen[expert]++);
    }
}

}  // namespace

void plan_copies_on_cpu(const CopyPlanParams& p) {
    choose_copies(p);
    return p.is_int64 ? write_physical<int64_t>(p) : write_physical<int32_t>(p);
}

}  // namespace deepep_moe

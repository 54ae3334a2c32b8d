// A loop over ranges on a bounded number of threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

namespace deepep_moe {

// Number of ranges that `parallel_ranges` makes: at least `min_size` items each, at most `num_threads`, at least one.
inline int num_ranges(int64_t num_items, int64_t min_size, int num_threads) {
    return static_cast<int>(std::clamp<int64_t>(num_items / min_size, 1, std::max(num_threads, 1)));
}

// Calls run(range, begin, end) for `count` contiguous ranges of [0, num_items), the last one on the calling thread. Threads are
// started per call (some 20 us each): nothing is left behind for a fork to break. The first exception, by range, is rethrown.
template <typename Run>
void parallel_ranges(int64_t num_items, int count, const Run& run) {
    std::vector<std::exception_ptr> errors(count);
    const auto guarded = [&](int range) {
        try {
            run(range, num_items * range / count, num_items * (range + 1) / count);
        } catch (...) {
            errors[range] = std::current_exception();
        }
    };
    {
        std::vector<std::jthread> threads;
        threads.reserve(count - 1);
        for (int range = 0; range < count - 1; ++range) threads.emplace_back(guarded, range);
        guarded(count - 1);
    }
    for (const auto& error : errors) {
        if (error) std::rethrow_exception(error);
    }
}

}  // namespace deepep_moe

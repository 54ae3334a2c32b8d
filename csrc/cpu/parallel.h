// Runs a loop on threads.
#pragma once

#include <exception>
#include <thread>
#include <vector>

namespace deepep_moe {

// Calls run(index) for each index below `count`, the last one on the calling thread. Threads are started per call (some 20 us each):
// nothing is left behind for a fork to break. The first exception, by index, is rethrown.
template <typename Run>
void run_on_threads(int count, const Run& run) {
    std::vector<std::exception_ptr> errors(count);
    const auto guarded = [&](int index) {
        try {
            run(index);
        } catch (...) {
            errors[index] = std::current_exception();
        }
    };
    {
        std::vector<std::jthread> threads;
        threads.reserve(count - 1);
        for (int index = 0; index < count - 1; ++index) threads.emplace_back(guarded, index);
        guarded(count - 1);
    }
    for (const auto& error : errors) {
        if (error) std::rethrow_exception(error);
    }
}

}  // namespace deepep_moe

// Finds out whether a process of this host is still running.
#pragma once

#include <compare>
#include <cstdint>

namespace deepep_moe {

// Identifies a process. Its start time, in clock ticks since boot and 0 if unknown, tells it from a later one with the same pid.
struct Process {
    int pid = 0;
    uint64_t start_time = 0;

    // Returns whether it has ended, or only waits to be reaped; false if that cannot be known.
    bool is_gone() const;
    auto operator<=>(const Process&) const = default;
};

// Returns the process with this `pid`, which must be running.
Process running(int pid);

}  // namespace deepep_moe

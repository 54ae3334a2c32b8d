// Is a process of this host still running?
#pragma once

#include <compare>
#include <cstdint>

namespace deepep_moe {

// A process; told from a later one that gets its number by when it began, in clock ticks since boot. 0: that is not known.
struct Process {
    int pid = 0;
    uint64_t start_time = 0;

    // Has it ended, or does it only wait to be reaped? No, where that cannot be known.
    bool is_gone() const;
    auto operator<=>(const Process&) const = default;
};

// `pid`, which is running now.
Process running(int pid);

}  // namespace deepep_moe

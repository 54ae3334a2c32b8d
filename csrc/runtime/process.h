// Is a process of this host still running?
#pragma once

#include <cstdint>

namespace deepep_moe {

// Start time of `pid` in clock ticks since boot, or 0 when it is gone or only waits to be reaped. Tells a process from a later one
// that got its number.
uint64_t process_start_time(int pid);

struct Process {
    int pid = 0;
    uint64_t start_time = 0;

    bool is_gone() const { return process_start_time(pid) != start_time; }
};

inline Process running(int pid) { return {pid, process_start_time(pid)}; }

}  // namespace deepep_moe

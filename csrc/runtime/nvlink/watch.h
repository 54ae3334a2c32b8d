// Looks at the processes of other ranks for waits that cannot do so themselves: those of a GPU.
#pragma once

#include <atomic>
#include <vector>

#include "runtime/process.h"

namespace deepep_moe {

// While it lives, bit r of `ended` is set soon after processes[r - first_rank] has ended. One thread looks for all watches of this process.
class Watch {
public:
    Watch(std::vector<Process> processes, std::atomic<unsigned>* ended, int first_rank);
    ~Watch();
    Watch(const Watch&) = delete;

private:
    friend class Watcher;
    const std::vector<Process> processes_;
    std::atomic<unsigned>* const ended_;
    const int first_;
    const int owner_pid_;  // in a process forked from it there is nothing to end
};

}  // namespace deepep_moe

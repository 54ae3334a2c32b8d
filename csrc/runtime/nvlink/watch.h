// Watches the processes of other ranks for waits on the GPU, which cannot do so themselves.
#pragma once

#include <atomic>
#include <vector>

#include "runtime/process.h"

namespace deepep_moe {

// While it lives, bit r of `ended` is set soon after processes[r - first_rank] has ended. One thread polls for all watches of this process.
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
    const int owner_pid_;  // a process forked from this one has no thread to stop
};

}  // namespace deepep_moe

// Knows the ranks of one host: their segments of shared memory, mapped here, and their processes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "runtime/process.h"
#include "runtime/shm/segment.h"

namespace deepep_moe {

class HostPeers {
public:
    HostPeers(int num_ranks, int rank, size_t segment_bytes);  // this rank's segment only

    std::string path() const { return own_.path(); }
    size_t segment_bytes() const { return segment_bytes_; }
    // Map the segments of all ranks; rank r has paths[r] and pids[r].
    void connect(const std::vector<std::string>& paths, const std::vector<int>& pids);
    void seal() { own_.hide(); }                                                                      // once all ranks are connected
    std::byte* memory(int rank) const { return rank == rank_ ? own_.data() : others_[rank].data(); }  // nullptr before `connect`

    // Return whole pages of this rank's segment to the system, between calls; they read as zeros from then on. Returns their bytes.
    int64_t give_back(int64_t offset, int64_t bytes) const;

    bool is_owner() const;                                     // false in a process forked from the one that made this
    void check_owner() const;                                  // throws DestroyedError there
    bool is_gone(int rank) const;                              // its process has ended
    std::string why_silent(int rank, double timeout_s) const;  // text for a message about a wait that ended in vain
    const char* advice(int rank) const;                        // text for the end of that message

private:
    const int rank_, owner_pid_;
    const size_t segment_bytes_;
    Segment own_;
    std::vector<Segment> others_;
    std::vector<Process> processes_;
};

// Throw for a segment at `path` that does not belong to `rank`.
[[noreturn]] void throw_foreign_segment(const std::string& path, int rank);

}  // namespace deepep_moe

#include "runtime/shm/peers.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <stdexcept>
#include <system_error>

#include "common/errors.h"

namespace deepep_moe {

HostPeers::HostPeers(int num_ranks, int rank, size_t segment_bytes)
    : rank_(rank),
      owner_pid_(getpid()),
      segment_bytes_(segment_bytes),
      own_(Segment::create(segment_bytes)),
      others_(num_ranks),
      processes_(num_ranks, Process{owner_pid_}) {}

void HostPeers::connect(const std::vector<std::string>& paths, const std::vector<int>& pids) {
    for (size_t rank = 0; rank < others_.size(); ++rank) {
        processes_[rank] = running(pids[rank]);
        if (static_cast<int>(rank) != rank_ && others_[rank].data() == nullptr) others_[rank] = Segment::open(paths[rank], segment_bytes_);
    }
}

int64_t HostPeers::give_back(int64_t offset, int64_t bytes) const {
    const int64_t page = sysconf(_SC_PAGESIZE), begin = (offset + page - 1) / page * page, end = (offset + bytes) / page * page;
    if (end <= begin) return 0;
    if (madvise(own_.data() + begin, static_cast<size_t>(end - begin), MADV_REMOVE) != 0)
        throw std::system_error(errno, std::generic_category(), "cannot give shared memory back (madvise)");
    return end - begin;
}

bool HostPeers::is_owner() const { return getpid() == owner_pid_; }

void HostPeers::check_owner() const {
    if (!is_owner())
        throw DestroyedError("this buffer belongs to process " + std::to_string(owner_pid_) + ", this is process " +
                             std::to_string(getpid()) + ", forked from it; create a Buffer in each process");
}

bool HostPeers::is_gone(int rank) const { return processes_[rank].is_gone(); }

std::string HostPeers::why_silent(int rank, double timeout_s) const {
    if (is_gone(rank)) return "its process " + std::to_string(processes_[rank].pid) + " is gone";
    char text[64];
    std::snprintf(text, sizeof(text), "nothing came for %g s", timeout_s);
    return text;
}

const char* HostPeers::advice(int rank) const { return is_gone(rank) ? "" : kIfSlow; }

void throw_foreign_segment(const std::string& path, int rank) {
    throw std::invalid_argument(path + " is not the shared memory of rank " + std::to_string(rank) +
                                "; are the ranks in different containers?");
}

}  // namespace deepep_moe

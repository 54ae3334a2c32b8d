#include "runtime/nvlink/memory.h"

#include <unistd.h>

#include <chrono>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>

#include "runtime/nvlink/device.h"

namespace deepep_moe {

// ---- workspaces that their rank has left, but a peer may still write to ----

namespace {

struct Remains {
    AddressRange workspace;
    int64_t left;  // offset of `GpuWaits::left`
    int device;
    std::vector<Process> processes;  // of the ranks

    bool have_all_left() const {
        std::vector<unsigned long long> words(processes.size());
        if (cudaMemcpy(words.data(), workspace.begin + left, 8 * words.size(), cudaMemcpyDeviceToHost) != cudaSuccess)
            return true;  // GPU failed
        for (size_t rank = 0; rank < words.size(); ++rank)
            if (words[rank] == 0 && !processes[rank].is_gone()) return false;
        return true;
    }
};

std::mutex kept_mutex;
std::vector<Remains>& kept() {
    static auto* const made = new std::vector<Remains>;  // never destroyed, because CUDA may be gone by then
    return *made;
}

// Wait up to 1 s for the peers, because they mostly leave at the same time.
void keep_until_left(const Remains& remains) {
    constexpr auto kPatience = std::chrono::seconds(1);
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    while (!remains.have_all_left() && std::chrono::steady_clock::now() < deadline)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const std::lock_guard lock(kept_mutex);
    kept().push_back(remains);
}

void free_those_left() {
    const std::lock_guard lock(kept_mutex);
    std::erase_if(kept(), [](Remains& remains) {
        const DeviceGuard guard(remains.device, std::nothrow);
        return remains.have_all_left() && (remains.workspace.free(), true);
    });
}

}  // namespace

// ---- a workspace ----

namespace {

// Do it. An error of CUDA begins with `failure`.
template <class Do>
void explained(const std::string& failure, const Do& it) {
    try {
        it();
    } catch (const std::runtime_error& error) {
        throw std::runtime_error(failure + " (" + error.what() + ")");
    }
}

}  // namespace

GpuMemory::GpuMemory(int num_ranks, int rank, int device, int first_rank)
    : num_ranks_(num_ranks), rank_(rank), first_(first_rank), index_(rank - first_rank), device_(device), owner_pid_(getpid()) {}

void GpuMemory::allocate(int64_t bytes, int64_t zeroed_bytes, int64_t left) {
    free_those_left();
    left_ = left;
    AddressRange& own = workspaces_[index_];
    if (!own.is_mapped) explained("cannot allocate the workspace", [&] { own.create(bytes, device_); });
    check_cuda(cudaMemset(own.begin, 0, zeroed_bytes), "cudaMemset");
    if (ended_ != nullptr) return;
    void* ended = nullptr;
    check_cuda(cudaHostAlloc(&ended, sizeof(*ended_), cudaHostAllocMapped | cudaHostAllocPortable), "cudaHostAlloc");
    ended_ = new (ended) std::atomic<unsigned>(0);
}

GpuMemory::~GpuMemory() {
    if (getpid() != owner_pid_) return;  // a forked child has no CUDA
    const DeviceGuard guard(device_, std::nothrow);
    const bool is_shared = is_mapped_ && cudaDeviceSynchronize() == cudaSuccess;
    watch_.reset();
    cudaFreeHost(ended_);
    for (int rank = 0; rank < num_ranks_; ++rank) {
        if (is_shared) leave(rank);
        if (rank != index_) workspaces_[rank].free();
    }
    if (is_shared) keep_until_left({workspaces_[index_], left_ + 8 * first_, device_, processes_});
    if (!is_shared) workspaces_[index_].free();
    free_those_left();
}

void GpuMemory::disconnect() {
    const DeviceGuard guard(device_);
    check_cuda(cudaDeviceSynchronize(), "the GPU failed");
    watch_.reset();
    for (int rank = 0; rank < num_ranks_; ++rank) {
        leave(rank);  // a peer that learns of no other rank any more may free its memory
        if (rank != index_) workspaces_[rank].unmap();
    }
}

void GpuMemory::free() {
    const DeviceGuard guard(device_);
    is_mapped_ = false;
    descriptors_.reset();
    workspaces_[index_].unmap();
}

// Tell a rank that this one writes to its memory no more.
void GpuMemory::leave(int rank) const {
    constexpr unsigned long long kYes = 1;
    const AddressRange& there = workspaces_[rank];
    if (there.is_mapped) cudaMemcpy(there.begin + left_ + 8 * rank_, &kYes, sizeof(kYes), cudaMemcpyHostToDevice);
}

GpuWaits GpuMemory::waits(double timeout_s, GpuFailure* failure, int* gave_up, GpuEnded* ended) const {
    const auto* left = reinterpret_cast<unsigned long long*>(workspaces_[index_].begin + left_);
    return {rank_, static_cast<unsigned long long>(timeout_s * 1e9), failure, gave_up, left, reinterpret_cast<unsigned*>(ended_), ended};
}

namespace {

struct Handle {
    DescriptorExchange::Address address;
    size_t bytes;
    Process process;  // as its rank sees it: a peer may see that it has ended, but not when it began
};

}  // namespace

const size_t GpuMemory::kHandleBytes = sizeof(Handle);

std::string GpuMemory::handle() {
    const DeviceGuard guard(device_);
    const AddressRange& own = workspaces_[index_];
    explained("cannot share the workspace", [&] { descriptors_ = std::make_unique<DescriptorExchange>(Descriptor(own.share())); });
    const Handle handle{descriptors_->address(), own.bytes, running(owner_pid_)};
    return {reinterpret_cast<const char*>(&handle), sizeof(handle)};
}

void GpuMemory::connect(const std::vector<std::string>& handles, double timeout_s) {
    const DeviceGuard guard(device_);
    const auto descriptors = std::exchange(descriptors_, nullptr);
    std::vector<DescriptorExchange::Address> addresses;
    processes_.clear();
    for (int rank = 0; rank < num_ranks_; ++rank) {
        Handle handle;
        std::memcpy(&handle, handles[rank].data(), sizeof(handle));
        if (handle.bytes != workspaces_[index_].bytes)
            throw std::runtime_error("the workspace of rank " + std::to_string(first_ + rank) + " has " + std::to_string(handle.bytes) +
                                     " bytes, and that of rank " + std::to_string(rank_) + " " + std::to_string(workspaces_[index_].bytes));
        addresses.push_back(handle.address);
        processes_.push_back(handle.process);
    }
    is_mapped_ = true;
    const auto theirs = descriptors->exchange(addresses, processes_, index_, first_, timeout_s);
    for (int rank = 0; rank < num_ranks_; ++rank)
        if (rank != index_)
            explained("cannot reach the GPU of rank " + std::to_string(first_ + rank),
                      [&] { workspaces_[rank].open(theirs[rank].number(), workspaces_[index_].bytes, device_); });
    watch_ = std::make_unique<Watch>(processes_, ended_, first_);
}

}  // namespace deepep_moe

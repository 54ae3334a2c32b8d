// Allocates memory of this GPU, and maps memory of the GPUs of one host: a rank's workspace and those of its peers.
#pragma once

#include <unistd.h>

#include <atomic>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cuda/driver.h"
#include "cuda/waits.h"
#include "common/types.h"
#include "runtime/process.h"
#include "runtime/nvlink/watch.h"

namespace deepep_moe {

// Owns what CUDA has made. A process forked from the one that made it has no CUDA, and drops it.
template <class Handle, auto kDestroy>
class Owned {
public:
    Owned(Handle handle = nullptr) : handle_(handle) {}
    Owned(const Owned&) = delete;
    Owned& operator=(Owned&& other) noexcept {
        std::swap(handle_, other.handle_);
        return *this;
    }
    ~Owned() {
        if (handle_ != nullptr && getpid() == owner_pid_) kDestroy(handle_);
    }
    operator Handle() const { return handle_; }
    Handle operator->() const { return handle_; }

private:
    Handle handle_;
    const pid_t owner_pid_ = getpid();
};
using DeviceMemory = Owned<void*, &cudaFree>;
using Event = Owned<cudaEvent_t, &cudaEventDestroy>;
using Stream = Owned<cudaStream_t, &cudaStreamDestroy>;

// Returns a new T in host memory that kernels can write, with `more_bytes` behind it. cudaFreeHost frees it.
template <class T>
T* new_pinned(size_t more_bytes = 0) {
    void* memory = nullptr;
    check_cuda(cudaHostAlloc(&memory, sizeof(T) + more_bytes, cudaHostAllocMapped | cudaHostAllocPortable), "cudaHostAlloc");
    return new (memory) T{};
}

// A pointer to be set, and the bytes that it will point to.
using Array = std::pair<void**, int64_t>;
template <class T>
Array array_of(T** pointer, int64_t count) {
    return {reinterpret_cast<void**>(pointer), count * static_cast<int64_t>(sizeof(T))};
}
// Allocate device memory for these arrays, zeroed, each on a boundary of 128 bytes. `memory` gets the whole. `failure` begins the message
// of an error.
void allocate_arrays(DeviceMemory& memory, std::span<const Array> arrays, const char* failure);

// Sets the calling thread's device, and restores the old one at the end of the scope.
class DeviceGuard {
public:
    explicit DeviceGuard(int device);
    DeviceGuard(int device, std::nothrow_t) noexcept;  // for destructors, where the GPU may have failed
    ~DeviceGuard();
    DeviceGuard(const DeviceGuard&) = delete;

private:
    int before_ = 0;
    bool changed_ = false;
};

constexpr int kMaxGpus = 8;  // ranks of one group on one host, each with a GPU

// Holds addresses of this process and the memory that is mapped there. It is a plain value, which a forked process without CUDA may drop.
struct AddressRange {
    std::byte* begin = nullptr;
    size_t bytes = 0;               // in whole pages
    unsigned long long memory = 0;  // CUDA's handle
    bool is_mapped = false;

    // Map new memory of `device`, or that of a peer's descriptor, for `device` to use. The first time they also reserve the addresses. They
    // throw std::runtime_error; nothing is mapped then.
    void create(size_t wished_bytes, int device);
    void open(int descriptor, size_t bytes, int device);
    int share() const;  // return a descriptor of the memory
    // Unmap the memory, which no kernel of this process may use then. The driver frees it once no process maps it.
    void unmap();
    void free() noexcept;  // unmap, and give the addresses back

private:
    void map(size_t whole_bytes, int device);
    int release();
};

// Maps a rank's workspace and those of its peers. Their addresses stay the same, so that CUDA graphs may hold them, while `free` and
// `allocate` change what is mapped there; the first bytes are zeroed. Peers may write to a workspace after its rank has destroyed it: the
// driver frees memory once no process maps it.
class GpuMemory {
public:
    // All functions here number the num_ranks ranks from `first_rank` on.
    GpuMemory(int num_ranks, int rank, int device, int first_rank = 0);
    ~GpuMemory();
    GpuMemory(const GpuMemory&) = delete;

    // `left` is the offset of rank 0's word in `GpuWaits::left`. It is called again after `free`, with the same numbers.
    void allocate(int64_t bytes, int64_t zeroed_bytes, int64_t left);
    std::string handle() const;  // returns kHandleBytes bytes
    int share() const { return workspaces_[index_].share(); }
    // The descriptors of the peers' workspaces are theirs, by rank, in this process; the caller closes them.
    void connect(const std::vector<std::string>& handles, const std::vector<int>& descriptors);
    // Unmap what `connect` has mapped, with no call under way. Once all ranks have done so, each calls `free`.
    void disconnect();
    void free();
    // Tell the peers that this rank makes no more calls, once its GPU has done its work. The memory stays mapped.
    void leave() noexcept;
    std::byte* of(int rank) const { return workspaces_[rank - first_].begin; }

    // Returns what a kernel needs to wait; `failure` is host memory, the other pointers are device memory.
    GpuWaits waits(double timeout_s, GpuFailure* failure, int* gave_up, GpuEnded* ended) const;
    bool has(int rank) const { return rank >= first_ && rank < first_ + num_ranks_; }
    int process_of(int rank) const { return processes_[rank - first_].pid; }

    static const size_t kHandleBytes;

private:
    void tell_end(int rank) const;

    const int num_ranks_, rank_, first_, index_, device_, owner_pid_;  // index_: rank_ - first_
    int64_t left_ = 0;
    AddressRange workspaces_[kMaxGpus];
    Process processes_[kMaxGpus];
    std::atomic<unsigned>* ended_ = nullptr;  // pinned, set by
    std::unique_ptr<Watch> watch_;            // from `connect` to `disconnect`
};

}  // namespace deepep_moe

#include "runtime/gpu_memory.h"

#include <unistd.h>

#include <chrono>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "common/errors.h"

namespace deepep_moe {

void check_cuda(cudaError_t status, const char* what) {
    if (status != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

int attribute(cudaDeviceAttr which, int device) {
    int value = 0;
    check_cuda(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
    return value;
}

bool is_capturing(cudaStream_t stream) {
    if (stream == nullptr) return false;  // the legacy stream cannot, and must not be asked while another captures
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check_cuda(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
}

unsigned long long capture_of(cudaStream_t stream) {
    if (stream == nullptr) return 0;
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long id = 0;
    check_cuda(cudaStreamGetCaptureInfo(stream, &status, &id), "cudaStreamGetCaptureInfo");
    return status == cudaStreamCaptureStatusActive ? id : 0;
}

void LastStreams::follow(cudaStream_t stream, cudaEvent_t event) {
    const bool captures = is_capturing(stream);
    const std::optional<cudaStream_t> last = captures ? captured_ : running_;
    if (last && *last != stream && is_capturing(*last) == captures) {
        check_cuda(cudaEventRecord(event, *last), "cudaEventRecord");
        check_cuda(cudaStreamWaitEvent(stream, event, 0), "cudaStreamWaitEvent");
    }
    go_on(stream);
}

void LastStreams::go_on(cudaStream_t stream) { (is_capturing(stream) ? captured_ : running_) = stream; }

DeviceGuard::DeviceGuard(int device) {
    check_cuda(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ != device) check_cuda(cudaSetDevice(device), "cudaSetDevice");
    changed_ = before_ != device;
}

DeviceGuard::DeviceGuard(int device, std::nothrow_t) noexcept {
    changed_ = cudaGetDevice(&before_) == cudaSuccess && before_ != device && cudaSetDevice(device) == cudaSuccess;
}

DeviceGuard::~DeviceGuard() {
    if (changed_) cudaSetDevice(before_);
}

// ---- workspaces that their rank has left, and a peer may still write to ----

namespace {

struct Remains {
    std::byte* workspace;
    int64_t left;  // offset of `GpuWaits::left`
    int device;
    std::vector<Process> processes;  // of the ranks

    bool have_all_left() const {
        std::vector<unsigned long long> words(processes.size());
        if (cudaMemcpy(words.data(), workspace + left, 8 * words.size(), cudaMemcpyDeviceToHost) != cudaSuccess) return true;  // GPU failed
        for (size_t rank = 0; rank < words.size(); ++rank)
            if (words[rank] == 0 && !processes[rank].is_gone()) return false;
        return true;
    }
};

std::mutex kept_mutex;
std::vector<Remains>& kept() {
    static auto* const made = new std::vector<Remains>;  // never destroyed: CUDA may be gone by then
    return *made;
}

// Waits for the peers a little: mostly they leave at the same time.
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
    std::erase_if(kept(), [](const Remains& remains) {
        const DeviceGuard guard(remains.device, std::nothrow);
        return remains.have_all_left() && (cudaFree(remains.workspace), true);
    });
}

}  // namespace

// ---- a workspace ----

GpuMemory::GpuMemory(int num_ranks, int rank, int device) : num_ranks_(num_ranks), rank_(rank), device_(device), owner_pid_(getpid()) {}

void GpuMemory::allocate(int64_t bytes, int64_t zeroed_bytes, int64_t left) {
    free_those_left();
    left_ = left;
    void* workspace = nullptr;
    check_cuda(cudaMalloc(&workspace, bytes), "cannot allocate the workspace");
    workspaces_[rank_] = static_cast<std::byte*>(workspace);
    check_cuda(cudaMemset(workspace, 0, zeroed_bytes), "cudaMemset");
    void* ended = nullptr;
    check_cuda(cudaHostAlloc(&ended, sizeof(*ended_), cudaHostAllocMapped | cudaHostAllocPortable), "cudaHostAlloc");
    ended_ = new (ended) std::atomic<unsigned>(0);
}

GpuMemory::~GpuMemory() {
    if (getpid() != owner_pid_) return;  // a forked child has no CUDA
    const DeviceGuard guard(device_, std::nothrow);
    const bool is_shared = is_connected_ && cudaDeviceSynchronize() == cudaSuccess;
    watch_.reset();
    cudaFreeHost(ended_);
    if (is_shared) tell_peers();
    for (int rank = 0; rank < num_ranks_; ++rank)
        if (rank != rank_ && workspaces_[rank] != nullptr) cudaIpcCloseMemHandle(workspaces_[rank]);
    if (is_shared) keep_until_left({workspaces_[rank_], left_, device_, {processes_, processes_ + num_ranks_}});
    if (!is_shared) cudaFree(workspaces_[rank_]);
    free_those_left();
}

void GpuMemory::tell_peers() const {
    constexpr unsigned long long kYes = 1;
    for (int rank = 0; rank < num_ranks_; ++rank)
        cudaMemcpy(workspaces_[rank] + left_ + 8 * rank_, &kYes, sizeof(kYes), cudaMemcpyHostToDevice);
}

GpuWaits GpuMemory::waits(double timeout_s, GpuFailure* failure, int* gave_up, GpuEnded* ended) const {
    const auto* left = reinterpret_cast<unsigned long long*>(workspaces_[rank_] + left_);
    return {rank_, static_cast<unsigned long long>(timeout_s * 1e9), failure, gave_up, left, reinterpret_cast<unsigned*>(ended_), ended};
}

std::string GpuMemory::describe_lack(const GpuFailure& f, int rank, double timeout_s) const {
    const std::string phase = name_of(static_cast<GpuPhase>(f.phase)), where = "rank " + std::to_string(rank),
                      peer = "rank " + std::to_string(f.peer);
    if (f.kind == kPeerLeft) return where + ", waiting for " + phase + ": " + peer + kHasLeft;
    const std::string why = f.kind == kPeerEnded
                                ? ", its process " + std::to_string(processes_[f.peer].pid) + " is gone"
                                : " within the deadline of " + std::to_string(static_cast<int64_t>(timeout_s * 1000)) + " ms";
    return where + ": " + peer + " did not deliver" + why + "; phase '" + phase + "', expected " + std::to_string(f.expected) + ", seen " +
           std::to_string(f.seen) + (f.kind == kPeerEnded ? "" : kIfSlow);
}

void GpuMemory::raise_lack(const GpuFailure& f, double timeout_s) const {
    const std::string message = describe_lack(f, rank_, timeout_s);
    if (f.kind == kPeerLeft) throw PeerError(message, f.peer);
    throw TimeoutError(message, f.peer, name_of(static_cast<GpuPhase>(f.phase)), f.expected, f.seen);
}

namespace {

struct Handle {
    cudaIpcMemHandle_t memory;
    int pid;
};

}  // namespace

const size_t GpuMemory::kHandleBytes = sizeof(Handle);

std::string GpuMemory::handle() const {
    const DeviceGuard guard(device_);
    Handle handle{{}, owner_pid_};
    check_cuda(cudaIpcGetMemHandle(&handle.memory, workspaces_[rank_]), "cannot share the workspace (cudaIpcGetMemHandle)");
    return {reinterpret_cast<const char*>(&handle), sizeof(handle)};
}

void GpuMemory::connect(const std::vector<std::string>& handles) {
    const DeviceGuard guard(device_);
    for (int rank = 0; rank < num_ranks_; ++rank) {
        Handle handle;
        std::memcpy(&handle, handles[rank].data(), sizeof(handle));
        processes_[rank] = running(handle.pid);
        if (rank == rank_) continue;
        void* workspace = nullptr;
        check_cuda(cudaIpcOpenMemHandle(&workspace, handle.memory, cudaIpcMemLazyEnablePeerAccess),
                   ("cannot reach the GPU of rank " + std::to_string(rank) + " (cudaIpcOpenMemHandle)").c_str());
        workspaces_[rank] = static_cast<std::byte*>(workspace);
    }
    watch_ = std::make_unique<Watch>(std::vector<Process>(processes_, processes_ + num_ranks_), ended_);
    is_connected_ = true;
}

}  // namespace deepep_moe

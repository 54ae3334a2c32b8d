#include "runtime/gpu_memory.h"

#include <unistd.h>

#include <chrono>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <thread>

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

constexpr unsigned long long kYes = 1;

struct Remains {
    std::byte* workspace;
    int64_t left;  // offset of u64[num_ranks]: kYes of each rank that has left
    int device;
    std::vector<Process> processes;  // of the ranks

    bool have_all_left() const {
        std::vector<unsigned long long> words(processes.size());
        if (cudaMemcpy(words.data(), workspace + left, 8 * words.size(), cudaMemcpyDeviceToHost) != cudaSuccess) return true;  // GPU failed
        for (size_t rank = 0; rank < words.size(); ++rank)
            if (words[rank] != kYes && !processes[rank].is_gone()) return false;
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
}

GpuMemory::~GpuMemory() {
    if (getpid() != owner_pid_) return;  // a forked child has no CUDA
    const DeviceGuard guard(device_, std::nothrow);
    const bool is_shared = is_connected_ && cudaDeviceSynchronize() == cudaSuccess;
    if (is_shared) tell_peers();
    for (int rank = 0; rank < num_ranks_; ++rank)
        if (rank != rank_ && workspaces_[rank] != nullptr) cudaIpcCloseMemHandle(workspaces_[rank]);
    if (is_shared) keep_until_left({workspaces_[rank_], left_, device_, {processes_, processes_ + num_ranks_}});
    if (!is_shared) cudaFree(workspaces_[rank_]);
    free_those_left();
}

void GpuMemory::tell_peers() const {
    for (int rank = 0; rank < num_ranks_; ++rank)
        cudaMemcpy(workspaces_[rank] + left_ + 8 * rank_, &kYes, sizeof(kYes), cudaMemcpyHostToDevice);
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
    is_connected_ = true;
}

}  // namespace deepep_moe

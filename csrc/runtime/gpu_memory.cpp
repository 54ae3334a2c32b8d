#include "runtime/gpu_memory.h"

#include <unistd.h>

#include <chrono>
#include <cstring>
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

GpuMemory::GpuMemory(int num_ranks, int rank, int device) : num_ranks_(num_ranks), rank_(rank), device_(device), owner_pid_(getpid()) {}

void GpuMemory::allocate(int64_t bytes, int64_t zeroed_bytes, int64_t left) {
    left_ = left;
    void* workspace = nullptr;
    check_cuda(cudaMalloc(&workspace, bytes), "cannot allocate the workspace");
    workspaces_[rank_] = static_cast<std::byte*>(workspace);
    check_cuda(cudaMemset(workspace, 0, zeroed_bytes), "cudaMemset");
}

GpuMemory::~GpuMemory() {
    if (getpid() != owner_pid_) return;  // a forked child has no CUDA
    const DeviceGuard guard(device_, std::nothrow);
    leave();
    for (int rank = 0; rank < num_ranks_; ++rank)
        if (rank != rank_ && workspaces_[rank] != nullptr) cudaIpcCloseMemHandle(workspaces_[rank]);
    cudaFree(workspaces_[rank_]);
}

void GpuMemory::leave() {
    constexpr auto kPatience = std::chrono::seconds(1);
    if (workspaces_[rank_] == nullptr || cudaDeviceSynchronize() != cudaSuccess) return;
    const unsigned long long yes = 1;
    for (int rank = 0; rank < num_ranks_; ++rank)
        if (workspaces_[rank] != nullptr) cudaMemcpy(workspaces_[rank] + left_ + 8 * rank_, &yes, sizeof(yes), cudaMemcpyHostToDevice);
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    for (bool all = false; !all && std::chrono::steady_clock::now() < deadline;) {
        unsigned long long left[kMaxGpus] = {};
        if (cudaMemcpy(left, workspaces_[rank_] + left_, 8 * num_ranks_, cudaMemcpyDeviceToHost) != cudaSuccess) return;
        all = true;
        for (int rank = 0; rank < num_ranks_; ++rank) all = all && (left[rank] == yes || workspaces_[rank] == nullptr);
        if (!all) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
}

std::string GpuMemory::handle() const {
    const DeviceGuard guard(device_);
    cudaIpcMemHandle_t handle;
    check_cuda(cudaIpcGetMemHandle(&handle, workspaces_[rank_]), "cannot share the workspace (cudaIpcGetMemHandle)");
    return {reinterpret_cast<const char*>(&handle), sizeof(handle)};
}

void GpuMemory::connect(const std::vector<std::string>& handles) {
    const DeviceGuard guard(device_);
    for (int rank = 0; rank < num_ranks_; ++rank) {
        if (rank == rank_) continue;
        cudaIpcMemHandle_t handle;
        std::memcpy(&handle, handles[rank].data(), sizeof(handle));
        void* workspace = nullptr;
        check_cuda(cudaIpcOpenMemHandle(&workspace, handle, cudaIpcMemLazyEnablePeerAccess),
                   ("cannot reach the GPU of rank " + std::to_string(rank) + " (cudaIpcOpenMemHandle)").c_str());
        workspaces_[rank] = static_cast<std::byte*>(workspace);
    }
}

}  // namespace deepep_moe

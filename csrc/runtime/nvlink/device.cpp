#include "runtime/nvlink/device.h"

#include <stdexcept>
#include <string>

namespace deepep_moe {

void check_cuda(cudaError_t status, const char* what) {
    if (status == cudaSuccess) return;
    cudaGetLastError();  // otherwise a later launch would report it again
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

int attribute(cudaDeviceAttr which, int device) {
    int value = 0;
    check_cuda(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
    return value;
}

void check_launch(const char* error) {
    if (error != nullptr) throw std::runtime_error(error);
}

void check_rail(bool is_same_build, size_t num_pes, int num_nodes) {
    if (!is_same_build)
        throw std::invalid_argument("deepep_moe._nvshmem and deepep_moe._C are of different builds: install deepep_moe again");
    if (static_cast<int>(num_pes) != num_nodes)
        throw std::invalid_argument(std::to_string(num_pes) + " PEs were given for " + std::to_string(num_nodes) + " nodes");
}

void allocate_arrays(void** memory, std::span<const Array> arrays, const char* failure) {
    const auto whole_lines = [](int64_t bytes) { return (bytes + 127) / 128 * 128; };
    int64_t total = 0;
    for (const auto& [pointer, bytes] : arrays) total += whole_lines(bytes);
    check_cuda(cudaMalloc(memory, total), failure);
    check_cuda(cudaMemset(*memory, 0, total), "cudaMemset");
    auto* next = static_cast<std::byte*>(*memory);
    for (const auto& [pointer, bytes] : arrays) *pointer = std::exchange(next, next + whole_lines(bytes));
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

}  // namespace deepep_moe

// Memory that other processes can map, as GPU memory can be.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>

#include "cuda_runtime_api.h"

namespace {

struct Allocation {
    int file;
    size_t bytes;
};
struct Handle {
    int process, file;
    size_t bytes;
};
std::mutex mutex;
std::map<void*, Allocation> allocations;

cudaError_t map(void** pointer, int file, size_t bytes) {
    *pointer = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (*pointer == MAP_FAILED) return cudaErrorInvalidValue;
    const std::lock_guard lock(mutex);
    allocations[*pointer] = {file, bytes};
    return cudaSuccess;
}

}  // namespace

void emulation::make_uninitialized(void* at, size_t bytes) { std::memset(at, 0xcd, std::min(bytes, size_t{1} << 24)); }

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
    const int file = memfd_create(("emulated-gpu-" + std::to_string(getpid())).c_str(), MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0 || map(pointer, file, bytes) != cudaSuccess)
        return cudaErrorInvalidValue;
    emulation::make_uninitialized(*pointer, bytes);
    return cudaSuccess;
}

static cudaError_t unmap(void* pointer) {
    const std::lock_guard lock(mutex);
    const auto found = allocations.find(pointer);
    if (found == allocations.end()) return cudaErrorInvalidValue;
    munmap(pointer, found->second.bytes);
    close(found->second.file);
    allocations.erase(found);
    return cudaSuccess;
}

// Waits for all streams, as CUDA does.
cudaError_t cudaFree(void* pointer) {
    if (pointer == nullptr) return cudaSuccess;
    cudaDeviceSynchronize();
    return unmap(pointer);
}

cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
    return (*pointer = std::calloc(1, bytes)) != nullptr ? cudaSuccess : cudaErrorInvalidValue;
}
cudaError_t cudaFreeHost(void* pointer) { return std::free(pointer), cudaSuccess; }

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* pointer) {
    const std::lock_guard lock(mutex);
    const auto found = allocations.find(pointer);
    if (found == allocations.end()) return cudaErrorInvalidValue;
    const Handle value{getpid(), found->second.file, found->second.bytes};
    std::memcpy(handle->reserved, &value, sizeof(value));
    return cudaSuccess;
}

static const char* place() {
    const char* given = std::getenv("DEEPEP_MOE_EMULATED_BUS");
    return given != nullptr ? given : "0";
}

cudaError_t cudaDeviceGetPCIBusId(char* id, int capacity, int) { return std::snprintf(id, capacity, "%s", place()), cudaSuccess; }

cudaError_t cudaDeviceGetByPCIBusId(int* device, const char* id) { return *device = std::strcmp(id, place()) == 0 ? 0 : 1, cudaSuccess; }

cudaError_t cudaIpcOpenMemHandle(void** pointer, cudaIpcMemHandle_t handle, unsigned) {
    Handle value;
    std::memcpy(&value, handle.reserved, sizeof(value));
    char path[64];
    std::snprintf(path, sizeof(path), "/proc/%d/fd/%d", value.process, value.file);
    const int file = open(path, O_RDWR | O_CLOEXEC);
    return file < 0 ? cudaErrorInvalidValue : map(pointer, file, value.bytes);
}

cudaError_t cudaIpcCloseMemHandle(void* pointer) { return unmap(pointer); }

// Memory of the device; other processes can map what the driver's functions make.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "cuda.h"
#include "cuda_runtime_api.h"

namespace {

constexpr char kUninitialized = static_cast<char>(0xcd);
constexpr size_t kMostUninitialized = size_t{1} << 24;  // more would take long

}  // namespace

void emulation::make_uninitialized(void* at, size_t bytes) { std::memset(at, kUninitialized, std::min(bytes, kMostUninitialized)); }

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
    if ((*pointer = std::aligned_alloc(256, (bytes + 255) / 256 * 256)) == nullptr) return cudaErrorInvalidValue;
    emulation::make_uninitialized(*pointer, bytes);
    return cudaSuccess;
}

// Waits for all streams, as CUDA does.
cudaError_t cudaFree(void* pointer) { return cudaDeviceSynchronize(), std::free(pointer), cudaSuccess; }

cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
    return (*pointer = std::calloc(1, bytes)) != nullptr ? cudaSuccess : cudaErrorInvalidValue;
}
cudaError_t cudaFreeHost(void* pointer) { return std::free(pointer), cudaSuccess; }

static const char* place() {
    const char* given = std::getenv("DEEPEP_MOE_EMULATED_BUS");
    return given != nullptr ? given : "0";
}

cudaError_t cudaDeviceGetPCIBusId(char* id, int capacity, int) { return std::snprintf(id, capacity, "%s", place()), cudaSuccess; }

cudaError_t cudaDeviceGetByPCIBusId(int* device, const char* id) { return *device = std::strcmp(id, place()) == 0 ? 0 : 1, cudaSuccess; }

cudaError_t cudaGetDriverEntryPoint(const char* name, void** found, unsigned, cudaDriverEntryPointQueryResult* result) {
    *found = dlsym(dlopen("libemulated_gpu.so", RTLD_LAZY | RTLD_NOLOAD), name);
    return *result = *found != nullptr ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound, cudaSuccess;
}

// ---- virtual memory ----

namespace {

// Reserved addresses stay mapped, with no access and no memory, so that nothing else is put there.
CUresult map(CUdeviceptr* address, size_t bytes, int flags, int file) {
    void* const at = mmap(reinterpret_cast<void*>(*address), bytes, PROT_NONE, flags | MAP_NORESERVE, file, 0);
    if (at == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    return *address = reinterpret_cast<CUdeviceptr>(at), CUDA_SUCCESS;
}

}  // namespace

CUresult cuGetErrorString(CUresult error, const char** text) {
    return *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "invalid argument", CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute, CUdevice) { return *value = 1, CUDA_SUCCESS; }
CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
    return *bytes = size_t{2} << 20, CUDA_SUCCESS;
}
CUresult cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
    return *address = 0, map(address, bytes, MAP_PRIVATE | MAP_ANONYMOUS, -1);
}
CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) { return munmap(reinterpret_cast<void*>(address), bytes), CUDA_SUCCESS; }

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp*, unsigned long long) {
    const int file = memfd_create(("emulated-gpu-" + std::to_string(getpid())).c_str(), MFD_CLOEXEC);
    const std::string content(std::min(bytes, kMostUninitialized), kUninitialized);
    const bool is_made = file >= 0 && ftruncate(file, static_cast<off_t>(bytes)) == 0 && write(file, content.data(), content.size()) > 0;
    if (is_made) return *handle = static_cast<CUmemGenericAllocationHandle>(file), CUDA_SUCCESS;
    return close(file), CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    return close(static_cast<int>(handle)) == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t, CUmemGenericAllocationHandle handle, unsigned long long) {
    return map(&address, bytes, MAP_SHARED | MAP_FIXED, static_cast<int>(handle));
}
CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) { return map(&address, bytes, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1); }
CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc*, size_t) {
    const bool is_set = mprotect(reinterpret_cast<void*>(address), bytes, PROT_READ | PROT_WRITE) == 0;
    return is_set ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemExportToShareableHandle(void* shared, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType, unsigned long long) {
    const int file = fcntl(static_cast<int>(handle), F_DUPFD_CLOEXEC, 0);
    return std::memcpy(shared, &file, sizeof(file)), file >= 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* shared, CUmemAllocationHandleType) {
    const int file = fcntl(static_cast<int>(reinterpret_cast<intptr_t>(shared)), F_DUPFD_CLOEXEC, 0);
    return *handle = static_cast<CUmemGenericAllocationHandle>(file), file >= 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

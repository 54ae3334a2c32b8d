#include "runtime/nvlink/memory.h"

#include <cstring>
#include <stdexcept>
#include <utility>

namespace deepep_moe {
namespace {

constexpr CUmemAllocationHandleType kDescriptor = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

void check(int status, const std::string& what) {
    if (status == CUDA_SUCCESS) return;
    const char* why = nullptr;
    DEEPEP_MOE_DRIVER(cuGetErrorString)(static_cast<CUresult>(status), &why);
    throw std::runtime_error(what + ": " + (why != nullptr ? why : "error " + std::to_string(status)));
}

// Call a function of the driver, and throw if it fails.
#define CHECK_DRIVER(function, ...) check(DEEPEP_MOE_DRIVER(function)(__VA_ARGS__), #function)

CUdeviceptr number(std::byte* address) { return reinterpret_cast<CUdeviceptr>(address); }

// Call `it`. If CUDA fails in it, the error begins with `failure`.
template <class Do>
void explained(const std::string& failure, const Do& it) {
    try {
        it();
    } catch (const std::runtime_error& error) {
        throw std::runtime_error(failure + " (" + error.what() + ")");
    }
}

}  // namespace

void allocate_arrays(DeviceMemory& memory, std::span<const Array> arrays, const char* failure) {
    const auto whole_lines = [](int64_t bytes) { return (bytes + 127) / 128 * 128; };
    int64_t total = 0;
    for (const auto& [pointer, bytes] : arrays) total += whole_lines(bytes);
    void* all = nullptr;
    check_cuda(cudaMalloc(&all, total), failure);
    memory = all;
    check_cuda(cudaMemset(all, 0, total), "cudaMemset");
    auto* next = static_cast<std::byte*>(all);
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

// ---- addresses ----

void AddressRange::create(size_t wished_bytes, int device) {
    for (const auto needed :
         {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED}) {
        int is_there = 0;
        CHECK_DRIVER(cuDeviceGetAttribute, &is_there, needed, device);
        if (is_there == 0) throw std::runtime_error("this GPU, or the share of it that this machine has, lacks virtual memory management");
    }
    CUmemAllocationProp kind{};
    kind.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    kind.requestedHandleTypes = kDescriptor;
    kind.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    kind.location.id = device;
    size_t page = 0;
    CHECK_DRIVER(cuMemGetAllocationGranularity, &page, &kind, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
    const size_t whole_bytes = (wished_bytes + page - 1) / page * page;
    CHECK_DRIVER(cuMemCreate, &memory, whole_bytes, &kind, 0);
    map(whole_bytes, device);
}

void AddressRange::open(int descriptor, size_t whole_bytes, int device) {
    void* const handle = reinterpret_cast<void*>(static_cast<intptr_t>(descriptor));
    CHECK_DRIVER(cuMemImportFromShareableHandle, &memory, handle, kDescriptor);
    map(whole_bytes, device);
}

// Map `memory`, and release it if that fails.
void AddressRange::map(size_t whole_bytes, int device) {
    is_mapped = true;
    try {
        if (begin == nullptr) {
            CUdeviceptr reserved = 0;
            CHECK_DRIVER(cuMemAddressReserve, &reserved, whole_bytes, 0, 0, 0);
            begin = reinterpret_cast<std::byte*>(reserved);
            bytes = whole_bytes;
        }
        CHECK_DRIVER(cuMemMap, number(begin), bytes, 0, memory, 0);
        CUmemAccessDesc access{};
        access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
        access.location.id = device;
        access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        CHECK_DRIVER(cuMemSetAccess, number(begin), bytes, &access, 1);
    } catch (...) {
        release();
        throw;
    }
}

int AddressRange::share() const {
    int descriptor = -1;
    CHECK_DRIVER(cuMemExportToShareableHandle, &descriptor, memory, kDescriptor, 0);
    return descriptor;
}

// Unmap and release the memory, if it is mapped, and return CUDA's error.
int AddressRange::release() {
    if (!std::exchange(is_mapped, false)) return CUDA_SUCCESS;
    const CUresult unmapped = begin == nullptr ? CUDA_SUCCESS : DEEPEP_MOE_DRIVER(cuMemUnmap)(number(begin), bytes);
    const CUresult released = DEEPEP_MOE_DRIVER(cuMemRelease)(memory);
    return unmapped != CUDA_SUCCESS ? unmapped : released;
}

void AddressRange::unmap() { check(release(), "cannot unmap a workspace (cuMemUnmap, cuMemRelease)"); }

void AddressRange::free() noexcept {
    try {
        release();
        if (begin != nullptr) DEEPEP_MOE_DRIVER(cuMemAddressFree)(number(std::exchange(begin, nullptr)), bytes);
    } catch (const std::runtime_error&) {  // the driver has gone, and the memory with it
    }
}

// ---- a workspace ----

GpuMemory::GpuMemory(int num_ranks, int rank, int device, int first_rank)
    : num_ranks_(num_ranks), rank_(rank), first_(first_rank), index_(rank - first_rank), device_(device), owner_pid_(getpid()) {}

void GpuMemory::allocate(int64_t bytes, int64_t zeroed_bytes, int64_t left) {
    left_ = left;
    AddressRange& workspace = workspaces_[index_];
    if (!workspace.is_mapped) explained("cannot allocate the workspace", [&] { workspace.create(bytes, device_); });
    check_cuda(cudaMemset(workspace.begin, 0, zeroed_bytes), "cudaMemset");
    if (ended_ == nullptr) ended_ = new_pinned<std::atomic<unsigned>>();
}

GpuMemory::~GpuMemory() {
    if (getpid() != owner_pid_) return;  // a forked child has no CUDA
    const DeviceGuard guard(device_, std::nothrow);
    leave();
    const bool has_ended = cudaDeviceSynchronize() == cudaSuccess;  // the words too may still be on their way
    cudaFreeHost(ended_);
    for (AddressRange& range : workspaces_)
        if (has_ended) range.free();  // a kernel that still ran would fault
}

void GpuMemory::leave() noexcept {
    const bool is_shared = cudaDeviceSynchronize() == cudaSuccess && watch_ != nullptr;
    watch_.reset();
    for (int rank = 0; is_shared && rank < num_ranks_; ++rank) tell_end(rank);
}

void GpuMemory::disconnect() {
    const DeviceGuard guard(device_);
    check_cuda(cudaDeviceSynchronize(), "the GPU failed");
    watch_.reset();
    for (int rank = 0; rank < num_ranks_; ++rank)
        if (rank != index_) workspaces_[rank].unmap();
}

void GpuMemory::free() {
    const DeviceGuard guard(device_);
    workspaces_[index_].unmap();
}

// Tell a rank that this one writes to its memory no more.
void GpuMemory::tell_end(int rank) const {
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
    size_t bytes;
    Process process;  // the rank itself has read its start time, because to a peer it may have ended already
};

}  // namespace

const size_t GpuMemory::kHandleBytes = sizeof(Handle);

std::string GpuMemory::handle() const {
    const Handle handle{workspaces_[index_].bytes, running(owner_pid_)};
    return {reinterpret_cast<const char*>(&handle), sizeof(handle)};
}

void GpuMemory::connect(const std::vector<std::string>& handles, const std::vector<int>& descriptors) {
    const DeviceGuard guard(device_);
    for (int rank = 0; rank < num_ranks_; ++rank) {
        Handle handle;
        std::memcpy(&handle, handles[rank].data(), sizeof(handle));
        processes_[rank] = handle.process;
        const size_t own_bytes = workspaces_[index_].bytes;
        explained("cannot reach the GPU of rank " + std::to_string(first_ + rank), [&] {
            if (handle.bytes != own_bytes)
                throw std::runtime_error("other pages: " + std::to_string(handle.bytes) + " bytes in place of " +
                                         std::to_string(own_bytes));
            if (rank != index_) workspaces_[rank].open(descriptors[rank], own_bytes, device_);
        });
    }
    watch_ = std::make_unique<Watch>(std::vector<Process>(processes_, processes_ + num_ranks_), ended_, first_);
}

}  // namespace deepep_moe

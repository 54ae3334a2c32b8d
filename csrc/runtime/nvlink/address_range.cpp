#include "runtime/nvlink/address_range.h"

#include <cstdint>
#include <utility>

#include "cuda/driver.h"

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

}  // namespace

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
    void* const given = reinterpret_cast<void*>(static_cast<intptr_t>(descriptor));
    CHECK_DRIVER(cuMemImportFromShareableHandle, &memory, given, kDescriptor);
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

// Return CUDA's error, if any.
int AddressRange::release() {
    if (!std::exchange(is_mapped, false)) return CUDA_SUCCESS;
    const CUresult unmapped = begin == nullptr ? CUDA_SUCCESS : DEEPEP_MOE_DRIVER(cuMemUnmap)(number(begin), bytes);
    const CUresult released = DEEPEP_MOE_DRIVER(cuMemRelease)(memory);
    return unmapped != CUDA_SUCCESS ? unmapped : released;
}

void AddressRange::unmap() { check(release(), "cannot unmap a workspace (cuMemUnmap, cuMemRelease)"); }

void AddressRange::free() noexcept {
    release();
    if (begin != nullptr) DEEPEP_MOE_DRIVER(cuMemAddressFree)(number(std::exchange(begin, nullptr)), bytes);
}

}  // namespace deepep_moe

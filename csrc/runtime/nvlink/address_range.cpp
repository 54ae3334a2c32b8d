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

void check_support(CUdevice_attribute needed, const char* what, int device) {
    int is_supported = 0;
    check(DEEPEP_MOE_DRIVER(cuDeviceGetAttribute)(&is_supported, needed, device), "cuDeviceGetAttribute");
    if (is_supported == 0) throw std::runtime_error(std::string("this GPU, or the share of it that this machine has, lacks ") + what);
}

CUdeviceptr number(std::byte* address) { return reinterpret_cast<CUdeviceptr>(address); }

}  // namespace

void AddressRange::create(size_t wished_bytes, int device) {
    check_support(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, "virtual memory management", device);
    check_support(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, "memory that is shared by file descriptors", device);
    CUmemAllocationProp kind{};
    kind.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    kind.requestedHandleTypes = kDescriptor;
    kind.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    kind.location.id = device;
    size_t page = 0;
    check(DEEPEP_MOE_DRIVER(cuMemGetAllocationGranularity)(&page, &kind, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
          "cuMemGetAllocationGranularity");
    const size_t whole_bytes = (wished_bytes + page - 1) / page * page;
    check(DEEPEP_MOE_DRIVER(cuMemCreate)(&memory, whole_bytes, &kind, 0), "cuMemCreate");
    map(whole_bytes, device);
}

void AddressRange::open(int descriptor, size_t whole_bytes, int device) {
    void* const given = reinterpret_cast<void*>(static_cast<intptr_t>(descriptor));
    check(DEEPEP_MOE_DRIVER(cuMemImportFromShareableHandle)(&memory, given, kDescriptor), "cuMemImportFromShareableHandle");
    map(whole_bytes, device);
}

// Map `memory`, and release it if that fails.
void AddressRange::map(size_t whole_bytes, int device) {
    is_mapped = true;
    try {
        if (begin == nullptr) {
            CUdeviceptr reserved = 0;
            check(DEEPEP_MOE_DRIVER(cuMemAddressReserve)(&reserved, whole_bytes, 0, 0, 0), "cuMemAddressReserve");
            begin = reinterpret_cast<std::byte*>(reserved);
            bytes = whole_bytes;
        }
        check(DEEPEP_MOE_DRIVER(cuMemMap)(number(begin), bytes, 0, memory, 0), "cuMemMap");
        CUmemAccessDesc access{};
        access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
        access.location.id = device;
        access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        check(DEEPEP_MOE_DRIVER(cuMemSetAccess)(number(begin), bytes, &access, 1), "cuMemSetAccess");
    } catch (...) {
        release();
        throw;
    }
}

int AddressRange::share() const {
    int descriptor = -1;
    check(DEEPEP_MOE_DRIVER(cuMemExportToShareableHandle)(&descriptor, memory, kDescriptor, 0), "cuMemExportToShareableHandle");
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

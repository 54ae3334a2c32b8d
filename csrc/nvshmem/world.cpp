// Makes the host calls of NVSHMEM. Only this file and the kernels include its headers.
#include "nvshmem/world.h"

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstring>
#include <future>
#include <stdexcept>
#include <thread>

#include <nvshmem_host.h>

namespace deepep_moe::nvshmem {
namespace {

constexpr size_t kAlignment = 128;
constexpr const char* kSeeOutput = "; set NVSHMEM_DEBUG=INFO and read this process's output for the cause";

int attached_device = -1;

[[noreturn]] void fail(const std::string& what) { throw std::runtime_error(what); }

void check_cuda(cudaError_t error, const char* call) {
    if (error != cudaSuccess) fail(std::string(call) + " failed: " + cudaGetErrorString(error));
}

void require_initialized(const char* what) {
    const int now = status();
    if (now < NVSHMEM_STATUS_IS_INITIALIZED || now > NVSHMEM_STATUS_FULL_MPG)
        fail(std::string(what) + " needs an initialized NVSHMEM, and its status is " + std::to_string(now) + "; call init first");
}

// NVSHMEM uses the current device, and initializes only half of itself if there is none.
void use_device(int device) {
    const cudaError_t error = cudaSetDevice(device);
    if (error != cudaSuccess)
        fail("NVSHMEM needs a CUDA device, and cudaSetDevice(" + std::to_string(device) + ") says: " + cudaGetErrorString(error));
}

// Waits on a separate stream, so that no other work has to wait behind it if it never ends.
void wait_until_quiet() {
    use_device(attached_device);
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");  // waits for kernels that still put
    cudaStream_t stream = nullptr;
    check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    nvshmemx_quiet_on_stream(stream);
    check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    check_cuda(cudaStreamDestroy(stream), "cudaStreamDestroy");
}

// Convert the bytes to NVSHMEM's struct.
nvshmemx_uniqueid_t unpacked(const std::string& bytes) {
    nvshmemx_uniqueid_t id = NVSHMEMX_UNIQUEID_INITIALIZER;
    if (bytes.size() != sizeof(id))
        throw std::invalid_argument("unique_id has " + std::to_string(bytes.size()) + " bytes; it must have " + std::to_string(sizeof(id)));
    std::memcpy(&id, bytes.data(), sizeof(id));
    return id;
}

}  // namespace

Version version_built() { return {NVSHMEM_VENDOR_MAJOR_VERSION, NVSHMEM_VENDOR_MINOR_VERSION, NVSHMEM_VENDOR_PATCH_VERSION}; }

Version version_found() {
    int major = 0, minor = 0, patch = 0;
    nvshmemx_vendor_get_version_info(&major, &minor, &patch);
    return {major, minor, patch};
}

int status() { return nvshmemx_init_status(); }

std::string unique_id() {
    if (status() != NVSHMEM_STATUS_NOT_INITIALIZED) fail("unique_id is for a new world, and this process has one; use that");
    nvshmemx_uniqueid_t id = NVSHMEMX_UNIQUEID_INITIALIZER;
    const int error = nvshmemx_get_uniqueid(&id);
    if (error != 0)
        fail("nvshmemx_get_uniqueid returned " + std::to_string(error) +
             ": it found no network interface to listen on; name one in NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME" + kSeeOutput);
    return {reinterpret_cast<const char*>(&id), sizeof(id)};
}

void bootstrap(const std::string& unique_id, int rank, int num_ranks) {
    if (num_ranks < 1 || rank < 0 || rank >= num_ranks)
        throw std::invalid_argument("rank is " + std::to_string(rank) + " of " + std::to_string(num_ranks) + "; it must be less");
    if (status() != NVSHMEM_STATUS_NOT_INITIALIZED)
        fail("NVSHMEM has status " + std::to_string(status()) + " already; a process has one world");
    const nvshmemx_uniqueid_t id = unpacked(unique_id);
    nvshmemx_init_attr_t attributes = NVSHMEMX_INIT_ATTR_INITIALIZER;
    int error = nvshmemx_set_attr_uniqueid_args(rank, num_ranks, &id, &attributes);
    if (error != 0) fail("nvshmemx_set_attr_uniqueid_args returned " + std::to_string(error));
    error = nvshmemx_hostlib_init_attr(NVSHMEMX_INIT_WITH_UNIQUEID, &attributes);
    if (error != 0) fail("nvshmemx_hostlib_init_attr returned " + std::to_string(error) + kSeeOutput);
}

void init(const std::string& unique_id, int rank, int num_ranks, int device) {
    use_device(device);
    bootstrap(unique_id, rank, num_ranks);
    if (status() < NVSHMEM_STATUS_IS_INITIALIZED)
        fail("NVSHMEM stopped at status " + std::to_string(status()) + ": the processes have met, and its GPU half failed" + kSeeOutput);
    attach(device);
}

void attach(int device) {
    require_initialized("attach");
    static bool is_attached = false;
    if (is_attached) return;
    const auto [built_major, built_minor, built_patch] = version_built();
    const auto [major, minor, patch] = version_found();
    // nvshmemx_init_attr ends the process if it fails. In an initialized world it only checks versions and registers this module.
    if (built_major != major || built_minor != minor)
        fail("built for NVSHMEM " + std::to_string(built_major) + "." + std::to_string(built_minor) + ", and found " +
             std::to_string(major) + "." + std::to_string(minor));
    use_device(device);
    nvshmemx_init_attr_t attributes = NVSHMEMX_INIT_ATTR_INITIALIZER;
    const int error = nvshmemx_init_attr(NVSHMEMX_INIT_WITH_UNIQUEID, &attributes);
    if (error != 0) fail("nvshmemx_init_attr returned " + std::to_string(error) + kSeeOutput);
    is_attached = true;
    attached_device = device;
}

int my_pe() {
    require_initialized("my_pe");
    return nvshmem_my_pe();
}

int num_pes() {
    require_initialized("num_pes");
    return nvshmem_n_pes();
}

int64_t free_bytes() {
    require_initialized("free_bytes");
    size_t free = 0, total = 0;
    check_cuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    return static_cast<int64_t>(free);
}

uint64_t allocate(int64_t bytes) {
    require_initialized("allocate");
    if (bytes < 1) throw std::invalid_argument("bytes is " + std::to_string(bytes) + "; it must be at least 1");
    void* const memory = nvshmem_align(kAlignment, static_cast<size_t>(bytes));
    if (memory == nullptr)
        fail("NVSHMEM's symmetric heap has no " + std::to_string(bytes) +
             " bytes left; set NVSHMEM_SYMMETRIC_SIZE higher (in bytes, the same on every rank) before the processes start");
    check_cuda(cudaMemset(memory, 0, static_cast<size_t>(bytes)), "cudaMemset");
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    return reinterpret_cast<uint64_t>(memory);
}

void free(uint64_t address) {
    require_initialized("free");
    nvshmem_free(reinterpret_cast<void*>(address));
}

uint64_t mapped(uint64_t address, int pe) {
    require_initialized("mapped");
    return reinterpret_cast<uint64_t>(nvshmem_ptr(reinterpret_cast<void*>(address), pe));
}

bool orders_network_writes(int device) {
    int ordering = 0;
    check_cuda(cudaDeviceGetAttribute(&ordering, cudaDevAttrGPUDirectRDMAWritesOrdering, device), "cudaDeviceGetAttribute");
    return ordering >= cudaGPUDirectRDMAWritesOrderingOwner;
}

bool quiet(double timeout_s) {
    require_initialized("quiet");
    std::promise<void> quieted;
    std::future<void> is_quiet = quieted.get_future();
    std::thread([quieted = std::move(quieted)]() mutable {
        try {
            wait_until_quiet();
            quieted.set_value();
        } catch (...) {
            quieted.set_exception(std::current_exception());
        }
    }).detach();
    if (is_quiet.wait_for(std::chrono::duration<double>(timeout_s)) != std::future_status::ready) return false;
    is_quiet.get();
    return true;
}

}  // namespace deepep_moe::nvshmem

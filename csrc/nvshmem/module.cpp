// Makes the module `deepep_moe._nvshmem` (see deepep_moe/_nvshmem.pyi): NVSHMEM in this process has one world, and its symmetric heap. Only
// this file and the kernels include its headers. Errors are std::runtime_error with their number and what to do.
//
// NVSHMEM ends the process if a call comes at the wrong time, so every function here checks `status` first. A "Collective" function is one
// that all PEs must call in the same order; it returns after all have called it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <cstring>
#include <future>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>

#include <nvshmem_host.h>

#include "cuda/driver.h"
#include "nvshmem/rail.h"

namespace py = pybind11;

namespace deepep_moe::nvshmem {
namespace {

constexpr size_t kAlignment = 128;
constexpr const char* kSeeOutput = "; set NVSHMEM_DEBUG=INFO and read this process's output for the cause";

int attached_device = -1;

[[noreturn]] void fail(const std::string& what) { throw std::runtime_error(what); }

// Returns 0: not initialized, 1: bootstrapped and not initialized, 2 and more: initialized.
int status() { return nvshmemx_init_status(); }

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

using Version = std::tuple<int, int, int>;  // major, minor, patch

Version version_built() { return {NVSHMEM_VENDOR_MAJOR_VERSION, NVSHMEM_VENDOR_MINOR_VERSION, NVSHMEM_VENDOR_PATCH_VERSION}; }

// Returns the version of the host library in this process.
Version version_found() {
    int major = 0, minor = 0, patch = 0;
    nvshmemx_vendor_get_version_info(&major, &minor, &patch);
    return {major, minor, patch};
}

// Returns the id of a new world. Only rank 0 calls it, because the id is bound to an address of its host.
std::string unique_id() {
    if (status() != NVSHMEM_STATUS_NOT_INITIALIZED) fail("unique_id is for a new world, and this process has one; use that");
    nvshmemx_uniqueid_t id = NVSHMEMX_UNIQUEID_INITIALIZER;
    const int error = nvshmemx_get_uniqueid(&id);
    if (error != 0)
        fail("nvshmemx_get_uniqueid returned " + std::to_string(error) +
             ": it found no network interface to listen on; name one in NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME" + kSeeOutput);
    return {reinterpret_cast<const char*>(&id), sizeof(id)};
}

// Makes an initialized world, perhaps another library's, known to the kernels of this module.
void attach(int device) {
    require_initialized("attach");
    static bool is_attached = false;
    if (is_attached) return;
    // nvshmemx_init_attr ends the process if it fails. In an initialized world it only registers this module, and checks versions, which
    // nvshmem_module.py has compared.
    use_device(device);
    nvshmemx_init_attr_t attributes = NVSHMEMX_INIT_ATTR_INITIALIZER;
    const int error = nvshmemx_init_attr(NVSHMEMX_INIT_WITH_UNIQUEID, &attributes);
    if (error != 0) fail("nvshmemx_init_attr returned " + std::to_string(error) + kSeeOutput);
    is_attached = true;
    attached_device = device;
}

// Runs the first half of `init`. NVSHMEM stays at status 1 if it can use no GPU. Collective.
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

// Creates the world of `num_ranks` processes, with `device` for this one. Collective.
void init(const std::string& unique_id, int rank, int num_ranks, int device) {
    use_device(device);
    bootstrap(unique_id, rank, num_ranks);
    if (status() < NVSHMEM_STATUS_IS_INITIALIZED)
        fail("NVSHMEM stopped at status " + std::to_string(status()) + ": the processes have met, and its GPU half failed" + kSeeOutput);
    attach(device);
}

int my_pe() {
    require_initialized("my_pe");
    return nvshmem_my_pe();
}

int num_pes() {
    require_initialized("num_pes");
    return nvshmem_n_pes();
}

// Returns the free memory of this GPU, in bytes, which bounds how much the heap can grow.
int64_t free_bytes() {
    require_initialized("free_bytes");
    size_t free = 0, total = 0;
    check_cuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    return static_cast<int64_t>(free);
}

// Allocates symmetric memory, aligned to 128 bytes and zeroed. Other PEs may write to it once they know that all have it. Collective.
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

// Collective.
void free(uint64_t address) {
    require_initialized("free");
    nvshmem_free(reinterpret_cast<void*>(address));
}

// Returns the address in this process of `address` on a PE, if loads of this GPU reach it, else 0.
uint64_t mapped(uint64_t address, int pe) {
    require_initialized("mapped");
    return reinterpret_cast<uint64_t>(nvshmem_ptr(reinterpret_cast<void*>(address), pe));
}

// Returns whether kernels of a GPU see a network card's writes to its memory in the order of writing, without a call of the host.
bool orders_network_writes(int device) {
    return attribute(cudaDevAttrGPUDirectRDMAWritesOrdering, device) >= cudaGPUDirectRDMAWritesOrderingOwner;
}

// Waits until everything that this process has put has arrived. It needs no other PE. Returns false past the deadline; then a thread that
// may never end goes on waiting, and so does anything that synchronizes the device.
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

}  // namespace
}  // namespace deepep_moe::nvshmem

PYBIND11_MODULE(_nvshmem, m) {
    using namespace deepep_moe;
    using WithoutGil = py::call_guard<py::gil_scoped_release>;
    m.doc() = "NVSHMEM for deepep_moe: the world of this process, its symmetric heap, and kernels. See deepep_moe/_nvshmem.pyi.";
    m.def("version_built", &nvshmem::version_built);
    m.def("version_found", &nvshmem::version_found);
    m.def("status", &nvshmem::status);
    m.def("unique_id", [] { return py::bytes(nvshmem::unique_id()); });
    m.def("bootstrap", &nvshmem::bootstrap, WithoutGil(), py::arg("unique_id"), py::arg("rank"), py::arg("num_ranks"));
    m.def("init", &nvshmem::init, WithoutGil(), py::arg("unique_id"), py::arg("rank"), py::arg("num_ranks"), py::arg("device"));
    m.def("attach", &nvshmem::attach, WithoutGil(), py::arg("device"));
    m.def("my_pe", &nvshmem::my_pe);
    m.def("num_pes", &nvshmem::num_pes);
    m.def("free_bytes", &nvshmem::free_bytes);
    m.def("allocate", &nvshmem::allocate, WithoutGil(), py::arg("bytes"));
    m.def("free", &nvshmem::free, WithoutGil(), py::arg("address"));
    m.def("mapped", &nvshmem::mapped, py::arg("address"), py::arg("pe"));
    m.def("orders_network_writes", &nvshmem::orders_network_writes, py::arg("device"));
    m.def("quiet", &nvshmem::quiet, WithoutGil(), py::arg("timeout_s"));
    m.def("rail_shim", [] { return py::capsule(&rail_shim(), kRailShimName); });
}

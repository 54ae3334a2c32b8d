// The library: PEs that find each other, the symmetric heap, and the checks of what kernels ask the network for.
#include "nvshmem.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>

#include "network.h"

namespace emulation::network {
namespace {

constexpr size_t kGap = 64;  // between blocks
constexpr std::chrono::microseconds kNap(50);
constexpr std::chrono::seconds kPatience(60);
constexpr int kRoundsToLook = 1000;  // of a wait, before it asks whether the others are still there

// The content of a unique id: a memory file of the process that made it, which the others open.
struct Meeting {
    int process, file;
};

struct World {
    int pe = -1, num_pes = 0;
    Words* words = nullptr;  // once it is initialised
    Network* network = nullptr;
    std::mutex mutex;                 // of the blocks, which kernels look at
    std::map<size_t, size_t> blocks;  // of the heap: offset, bytes

    size_t bytes() const { return kWordsBytes + static_cast<size_t>(num_pes) * kHeapBytes * (options().flush != 0 ? 2 : 1); }
    std::byte* heap_of(int of) const { return reinterpret_cast<std::byte*>(words) + kWordsBytes + static_cast<size_t>(of) * kHeapBytes; }
    std::byte* heap() const { return heap_of(pe); }
};

// Never destroyed: kernels may run while the process ends.
World& world() {
    static auto* const made = new World;
    return *made;
}

World& initialized(const char* call) {
    if (world().words == nullptr) fault(std::string(call) + " before the library is initialised");
    return world();
}

bool is_gone(int process) {
    std::ifstream status("/proc/" + std::to_string(process) + "/stat");
    std::string line;
    if (!std::getline(status, line)) return true;
    const char state = line[line.rfind(')') + 2];
    return state == 'Z' || state == 'X';
}

// ---- calls that all PEs make ----

void wait_for_all(World& w, const char* call) {
    const uint64_t number = ++w.words->barriers[w.pe];
    for (int pe = 0; pe < w.num_pes; ++pe)
        for (int round = 1; w.words->barriers[pe] < number; ++round) {
            std::this_thread::sleep_for(kNap);
            if (round % kRoundsToLook == 0 && w.words->barriers[pe] < number && is_gone(w.words->process[pe]))
                fault(std::string(call) + " waits for PE " + std::to_string(pe) + ", whose process is gone");
        }
}

void agree(World& w, const char* call, uint64_t argument) {
    w.words->arguments[w.pe] = argument;
    wait_for_all(w, call);
    for (int pe = 0; pe < w.num_pes; ++pe)
        if (const uint64_t other = w.words->arguments[pe]; other != argument)
            fault(std::string(call) + " of " + std::to_string(argument) + " here and of " + std::to_string(other) + " on PE " +
                  std::to_string(pe) + "; all PEs must make the same calls");
    wait_for_all(w, call);
}

// ---- what kernels ask for ----

size_t offset_of(World& w, const char* what, const void* pointer, size_t bytes, int pe) {
    const auto at = reinterpret_cast<uintptr_t>(pointer), base = reinterpret_cast<uintptr_t>(w.heap());
    const std::lock_guard lock(w.mutex);
    auto block = at >= base ? w.blocks.upper_bound(at - base) : w.blocks.begin();
    if (block == w.blocks.begin() || (--block, at - base + bytes > block->first + block->second)) {
        char text[200];
        std::snprintf(text, sizeof(text), "%s %p with %zu bytes, of a put to PE %d, is not in one block of the symmetric heap", what,
                      pointer, bytes, pe);
        fault(text);
    }
    return at - base;
}

Put checked(World& w, const void* to, const void* from, size_t bytes, uint64_t* signal, uint64_t value, int signal_op, int pe) {
    const std::string target = "a put to PE " + std::to_string(pe);
    if (pe < 0 || pe >= w.num_pes) fault(target + "; there are " + std::to_string(w.num_pes));
    if (pe == w.pe) fault(target + ", which is the sender itself");
    if (signal_op != NVSHMEM_SIGNAL_SET)
        fault(target + " with signal operation " + std::to_string(signal_op) +
              "; only NVSHMEM_SIGNAL_SET keeps its meaning when puts overtake");
    if (reinterpret_cast<uintptr_t>(signal) % 8 != 0) fault(target + " with a signal that is not aligned to 8 bytes");
    Put put{};
    put.pe = pe;
    put.bytes = bytes;
    put.value = value;
    put.signal = offset_of(w, "the signal", signal, 8, pe);
    if (bytes == 0) return put;
    put.to = offset_of(w, "the destination", to, bytes, pe);
    put.from = offset_of(w, "the source", from, bytes, pe);
    return put;
}

void put(const void* to, const void* from, size_t bytes, uint64_t* signal, uint64_t value, int signal_op, int pe) {
    World& w = initialized("a put");
    if (bytes == 0) fault("a put of 0 bytes to PE " + std::to_string(pe) + "; call nvshmemx_signal_op");
    w.network->post(checked(w, to, from, bytes, signal, value, signal_op, pe));
}

void check_lanes_agree(const void* to, const void* from, size_t bytes, const uint64_t* signal, uint64_t value, int pe) {
    uint64_t mixed = 0;
    for (const uint64_t each : {reinterpret_cast<uint64_t>(to), reinterpret_cast<uint64_t>(from), static_cast<uint64_t>(bytes),
                                reinterpret_cast<uint64_t>(signal), value, static_cast<uint64_t>(pe)})
        mixed = (mixed ^ each) * 0x9e3779b97f4a7c15u;
    const uint64_t* const all = exchange(mixed);
    if (std::any_of(all, all + 32, [&](uint64_t other) { return other != mixed; })) fault("the lanes of a warp ask for different puts");
}

// ---- start and end ----

int fail(const std::string& why) {
    std::fprintf(stderr, "emulated NVSHMEM: %s\n", why.c_str());
    return 1;
}

int join(World& w, const nvshmemx_uniqueid_args_t& given) {
    Meeting meeting;
    std::memcpy(&meeting, given.id->internal, sizeof(meeting));
    w.pe = given.myrank;
    w.num_pes = given.nranks;
    const std::string path = "/proc/" + std::to_string(meeting.process) + "/fd/" + std::to_string(meeting.file);
    const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (file < 0 || ftruncate(file, static_cast<off_t>(w.bytes())) != 0) return fail("cannot open the memory of the unique id, " + path);
    void* const mapped = mmap(nullptr, w.bytes(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    close(file);
    if (mapped == MAP_FAILED) return fail("cannot map " + std::to_string(w.bytes()) + " bytes");
    auto* const words = static_cast<Words*>(mapped);
    if (int nobody = 0; !words->process[w.pe].compare_exchange_strong(nobody, getpid()))
        return fail("process " + std::to_string(nobody) + " is PE " + std::to_string(w.pe) + " as well");
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    for (int pe = 0; pe < w.num_pes; ++pe)
        while (words->process[pe] == 0) {
            if (std::chrono::steady_clock::now() > deadline) return fail("PE " + std::to_string(pe) + " did not come within 60 s");
            std::this_thread::sleep_for(kNap);
        }
    w.network = new Network(w.pe, w.num_pes, *words);
    w.words = words;
    return 0;
}

}  // namespace

void fault(const std::string& what) {
    std::fprintf(stderr, "emulated NVSHMEM: rank %d: %s\n", world().pe, what.c_str());
    std::abort();
}

}  // namespace emulation::network

using namespace emulation::network;

int nvshmemx_get_uniqueid(nvshmemx_uniqueid_t* id) {
    const Meeting meeting{getpid(), memfd_create("emulated-nvshmem", MFD_CLOEXEC)};
    *id = NVSHMEMX_UNIQUEID_INITIALIZER;
    std::memcpy(id->internal, &meeting, sizeof(meeting));
    return meeting.file >= 0 ? 0 : 1;
}

int nvshmemx_set_attr_uniqueid_args(int rank, int num_ranks, const nvshmemx_uniqueid_t* id, nvshmemx_init_attr_t* attributes) {
    if (rank < 0 || rank >= num_ranks || num_ranks > kMaxPes || id == nullptr || attributes == nullptr) return 1;
    attributes->args.uid_args = NVSHMEMX_UNIQUEID_ARGS_INITIALIZER;
    attributes->args.uid_args.id = const_cast<nvshmemx_uniqueid_t*>(id);
    attributes->args.uid_args.myrank = rank;
    attributes->args.uid_args.nranks = num_ranks;
    return 0;
}

// Later calls change nothing.
int nvshmemx_hostlib_init_attr(unsigned flags, nvshmemx_init_attr_t* attributes) {
    if (options().fail_init != 0) return 1;
    if (world().words != nullptr) return 0;
    if (flags != NVSHMEMX_INIT_WITH_UNIQUEID || attributes == nullptr || attributes->args.uid_args.id == nullptr) return 1;
    return join(world(), attributes->args.uid_args);
}

int nvshmemx_init_attr(unsigned flags, nvshmemx_init_attr_t* attributes) {
    const int status = nvshmemx_hostlib_init_attr(flags, attributes);
    if (status != 0) std::exit(-1);
    return status;
}

int nvshmemx_init_status() { return world().words != nullptr ? NVSHMEM_STATUS_IS_INITIALIZED : NVSHMEM_STATUS_NOT_INITIALIZED; }

void nvshmemx_vendor_get_version_info(int* major, int* minor, int* patch) {
    *major = NVSHMEM_VENDOR_MAJOR_VERSION;
    *minor = NVSHMEM_VENDOR_MINOR_VERSION;
    *patch = NVSHMEM_VENDOR_PATCH_VERSION;
}

int nvshmem_my_pe() { return initialized("nvshmem_my_pe").pe; }
int nvshmem_n_pes() { return initialized("nvshmem_n_pes").num_pes; }

void* nvshmem_align(size_t alignment, size_t bytes) {
    World& w = initialized("nvshmem_align");
    if (alignment == 0 || (alignment & (alignment - 1)) != 0)
        fault("nvshmem_align with an alignment of " + std::to_string(alignment) + "; give a power of two");
    agree(w, "nvshmem_align", bytes);
    const auto begin_after = [&](size_t end) { return (end + kGap + alignment - 1) / alignment * alignment; };
    size_t begin = begin_after(0);
    {
        const std::lock_guard lock(w.mutex);
        for (const auto& [offset, size] : w.blocks)
            if (begin < offset + size + kGap && offset < begin + bytes + kGap) begin = begin_after(offset + size);
        if (bytes == 0 || begin + bytes > kHeapBytes) return nullptr;
        w.blocks[begin] = bytes;
    }
    emulation::make_uninitialized(w.heap() + begin, bytes);
    wait_for_all(w, "nvshmem_align");
    return w.heap() + begin;
}

void nvshmem_free(void* pointer) {
    World& w = initialized("nvshmem_free");
    if (pointer == nullptr) return;
    const auto offset = static_cast<size_t>(static_cast<std::byte*>(pointer) - w.heap());
    {
        const std::lock_guard lock(w.mutex);
        const auto block = w.blocks.find(offset);
        if (block == w.blocks.end()) fault("nvshmem_free of what is no block of the symmetric heap");
        w.network->check_freed(block->first, block->first + block->second);
    }
    agree(w, "nvshmem_free", offset);
    const std::lock_guard lock(w.mutex);
    w.blocks.erase(offset);
}

// Every PE is reached by loads; what is stored so is not checked.
void* nvshmem_ptr(const void* pointer, int pe) {
    World& w = initialized("nvshmem_ptr");
    return w.heap_of(pe) + (static_cast<const std::byte*>(pointer) - w.heap());
}

void nvshmemx_quiet_on_stream(cudaStream_t stream) {
    World& w = initialized("nvshmemx_quiet_on_stream");
    emulation::enqueue(stream, [&w] { w.network->wait_until_idle(); });
}

uint64_t emulated_nvshmem_bytes(int pe) { return initialized("emulated_nvshmem_bytes").network->bytes_to(pe); }

// ---- of kernels ----

void nvshmemx_putmem_signal_nbi_warp(void* to, const void* from, size_t bytes, uint64_t* signal, uint64_t value, int signal_op, int pe) {
    check_lanes_agree(to, from, bytes, signal, value, pe);
    if (threadIdx.x % 32 == 0) put(to, from, bytes, signal, value, signal_op, pe);
}

void nvshmemx_putmem_signal_nbi_block(void* to, const void* from, size_t bytes, uint64_t* signal, uint64_t value, int signal_op, int pe) {
    __syncthreads();
    check_lanes_agree(to, from, bytes, signal, value, pe);
    if (threadIdx.x == 0) put(to, from, bytes, signal, value, signal_op, pe);
}

void nvshmemx_signal_op(uint64_t* signal, uint64_t value, int signal_op, int pe) {
    World& w = initialized("nvshmemx_signal_op");
    w.network->post(checked(w, nullptr, nullptr, 0, signal, value, signal_op, pe));
}

int nvshmem_uint64_test(uint64_t* word, int comparison, uint64_t value) {
    World& w = initialized("nvshmem_uint64_test");
    emulation::yield();
    if (comparison != NVSHMEM_CMP_GE) fault("nvshmem_uint64_test with comparison " + std::to_string(comparison) + ", which nobody needs");
    const bool is_there = __atomic_load_n(word, __ATOMIC_ACQUIRE) >= value;
    if (is_there && options().flush != 0) w.network->show_arrivals();
    return is_there;
}

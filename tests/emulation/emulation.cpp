#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <time.h>
#include <ucontext.h>

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>

#include "cuda/device/ptx.cuh"

namespace emulation {
namespace {

// No multiple of a page: the first lines of all stacks would share few sets of the caches.
constexpr size_t kStackBytes = 128 * 1024 + 320;
constexpr int kMaxThreads = 1024;
constexpr int kUninitialized = 0xcd;
// A block sleeps after as many rounds of its fibers in which all that ran waited for somebody else: there are more blocks than cores.
// It sleeps longer each time, so that blocks that wait leave the cores to those that compute.
constexpr int kIdleRounds = 4;
constexpr long kFirstNapNs = 50'000, kLongestNapNs = 800'000;
// Votes of a warp since its last pause: with more of them it does not wait, it computes.
constexpr int kVotesOfAWait = 8;

[[noreturn]] void die(const char* what) {
    std::fprintf(stderr, "emulated GPU: %s\n", what);
    std::abort();
}

// The point at which a fiber resumes. swapcontext would ask the kernel for the signal mask each time.
using Registers = void* [5];

struct Store {
    char* to;
    const char* from;
    size_t bytes;
    std::vector<char> read;  // what it has read of shared memory
};

struct Group {
    std::vector<Store> stores;
    bool is_read = false;
};

struct Fiber {
    Registers registers;
    bool has_begun = false;
    std::vector<Store> uncommitted;
    std::vector<Group> groups;
    std::vector<std::pair<void*, const void*>> copies;  // of 16 bytes
};

struct Warp {
    uint64_t values[2][32];
    int arrived = 0, votes = 0;
    unsigned generation = 0;
    uint32_t live = 0, runnable = 0;  // a bit for each lane
};

struct Load {
    void* to;
    const void* from;
    uint32_t bytes;
    uint64_t* barrier;
};

struct Launch {
    const std::function<void()>& body;
    int blocks, threads;
    size_t shared_bytes;
    int num_running;
    std::condition_variable done;
};

// A block, and the thread that runs it, which then waits for another one. Fibers and their stacks stay from block to block.
struct Block {
    Place place{};
    std::vector<Fiber> fibers = std::vector<Fiber>(kMaxThreads);
    std::vector<Warp> warps;
    std::vector<Load> loads;
    std::vector<char> shared;
    char* shared_begin = nullptr;
    char* stacks = nullptr;
    int current = 0, live = 0, at_barrier = 0, idle_rounds = 0;
    long nap_ns = 0;
    bool is_active = false, has_paused = false;  // in this round
    unsigned barrier_generation = 0;
    bool barrier_votes[2] = {};  // of the threads at the barrier, by generation
    Registers scheduler;
    const std::function<void()>* body = nullptr;

    Block();
    void run(const Launch& launch, unsigned index);
    void go_on();
    [[noreturn]] void enter(Fiber& fiber);
    void begin_first();
    int next_runnable();
    void end_round();
    Warp& warp() { return warps[current / 32]; }
    uint32_t lane_bit() const { return uint32_t{1} << current % 32; }
    void release_barrier_if_full() {
        if (live == 0 || at_barrier != live) return;
        at_barrier = 0;
        barrier_votes[++barrier_generation & 1] = false;
        is_active = true;
        for (Warp& warp : warps) warp.runnable = warp.live;
    }
    bool holds(const void* pointer, size_t bytes) const {
        const char* begin = static_cast<const char*>(pointer);
        return begin >= shared_begin && begin + bytes <= shared.data() + shared.size();
    }
};

[[gnu::tls_model("initial-exec")]] constinit thread_local Block* block = nullptr;

// __builtin_longjmp must not be in the function that calls __builtin_setjmp.
[[noreturn, gnu::noinline]] void jump(Registers& to) { __builtin_longjmp(to, 1); }

void write(Group& group) {
    for (Store& store : group.stores) std::memcpy(store.to, store.read.data(), store.bytes);
}

void read(Group& group) {
    for (Store& store : group.stores) store.read.assign(store.from, store.from + store.bytes);
    group.is_read = true;
}

void end_thread() {
    Fiber& self = block->fibers[block->current];
    if (!self.uncommitted.empty()) die("a thread ends with uncommitted bulk stores");
    for (Group& group : self.groups) {
        if (!group.is_read) die("a thread ends while its bulk stores may still read shared memory");
        write(group);
    }
    self.groups.clear();
    self.copies.clear();  // a GPU drops those that nobody waits for
    block->warp().live &= ~block->lane_bit();
    block->warp().runnable &= ~block->lane_bit();
    --block->live;
    block->release_barrier_if_full();
}

// A fiber is a CUDA thread after the other.
void begin_fiber() {
    while (true) {
        (*block->body)();
        end_thread();
        block->go_on();
    }
}

// A block that only waits yields to other blocks, and after some rounds sleeps for a while.
void Block::end_round() {
    idle_rounds = has_paused && !is_active ? idle_rounds + 1 : 0;
    is_active = has_paused = false;
    if (idle_rounds < kIdleRounds) {
        nap_ns = kFirstNapNs;
        if (idle_rounds > 0) sched_yield();
        return;
    }
    const timespec nap{0, nap_ns};
    nanosleep(&nap, nullptr);
    nap_ns = std::min(nap_ns * 5 / 4, kLongestNapNs);
}

// The next fiber, in turn, that does not wait for others of its block.
int Block::next_runnable() {
    const int num_warps = static_cast<int>(warps.size());
    int index = current / 32;
    const uint32_t later = warps[index].runnable & ~(lane_bit() | (lane_bit() - 1));
    if (later != 0) return index * 32 + __builtin_ctz(later);
    for (int step = 0; step <= num_warps; ++step) {
        if (++index == num_warps) index = 0, end_round();
        if (warps[index].runnable != 0) return index * 32 + __builtin_ctz(warps[index].runnable);
    }
    die("all threads of a block wait for each other");
}

void Block::enter(Fiber& fiber) {
    if (fiber.has_begun) jump(fiber.registers);
    fiber.has_begun = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack = {stacks + current * kStackBytes, 0, kStackBytes};
    context.uc_link = nullptr;
    makecontext(&context, begin_fiber, 0);
    setcontext(&context);
    die("no context");
}

void Block::go_on() {
    const int before = current, next = live == 0 ? -1 : next_runnable();
    if (next == before || __builtin_setjmp(fibers[before].registers) != 0) return;
    if (next < 0) jump(scheduler);
    current = next;
    place.thread.x = static_cast<unsigned>(next);
    enter(fibers[next]);
}

Block::Block() {
    const size_t bytes = kMaxThreads * kStackBytes;
    stacks = static_cast<char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (stacks == MAP_FAILED) die("no memory for stacks");
}

[[gnu::noinline]] void Block::begin_first() {
    if (__builtin_setjmp(scheduler) == 0) enter(fibers[0]);
}

void Block::run(const Launch& launch, unsigned index) {
    block = this;
    place = {{0}, {index}, {static_cast<unsigned>(launch.threads)}, {static_cast<unsigned>(launch.blocks)}};
    body = &launch.body;
    live = launch.threads;
    current = at_barrier = idle_rounds = 0;
    is_active = has_paused = false;
    warps.assign((live + 31) / 32, Warp());
    for (int i = 0; i < live; ++i) warps[i / 32].live |= uint32_t{1} << i % 32;
    for (Warp& warp : warps) warp.runnable = warp.live;
    shared.assign(launch.shared_bytes + 128, static_cast<char>(kUninitialized));
    shared_begin = shared.data() + (128 - reinterpret_cast<uintptr_t>(shared.data()) % 128) % 128;
    begin_first();
    if (!loads.empty()) die("a block ends with bulk loads that nobody waited for");
}

// Threads that run blocks. A kernel has one for each of its blocks; between kernels they wait.
class Pool {
public:
    // Never destroyed: kernels may run while the process ends. A process that was forked has none of the threads.
    static Pool& of_process() {
        static Pool* made = [] {
            pthread_atfork(nullptr, nullptr, [] { made = new Pool; });
            return new Pool;
        }();
        return *made;
    }

    void run(Launch& launch) {
        std::unique_lock lock(mutex_);
        launch.num_running = launch.blocks;
        for (int index = 0; index < launch.blocks; ++index) start({&launch, static_cast<unsigned>(index)});
        launch.done.wait(lock, [&] { return launch.num_running == 0; });
    }

private:
    struct Work {
        Launch* launch;
        unsigned index;
    };
    struct Worker {
        Work work;
        std::condition_variable changed;
    };

    void start(const Work& work) {
        if (idle_.empty()) {
            std::thread([this, mine = new Worker{work, {}}] { serve(*mine); }).detach();
            return;
        }
        Worker& worker = *idle_.back();
        idle_.pop_back();
        worker.work = work;
        worker.changed.notify_one();
    }

    [[noreturn]] void serve(Worker& worker) {
        Block mine;
        std::unique_lock lock(mutex_);
        while (true) {
            worker.changed.wait(lock, [&] { return worker.work.launch != nullptr; });
            Launch& launch = *worker.work.launch;
            lock.unlock();
            mine.run(launch, worker.work.index);
            lock.lock();
            worker.work.launch = nullptr;
            idle_.push_back(&worker);
            if (--launch.num_running == 0) launch.done.notify_all();
        }
    }

    std::mutex mutex_;
    std::vector<Worker*> idle_;
};

}  // namespace

const Place& place() { return block->place; }

void yield() { block->go_on(); }

void pause() {
    block->has_paused = true;
    block->warp().votes = 0;
    block->go_on();
}

bool sync_threads(bool vote) {
    const unsigned generation = block->barrier_generation;
    block->barrier_votes[generation & 1] |= vote;
    ++block->at_barrier;
    block->warp().runnable &= ~block->lane_bit();
    block->release_barrier_if_full();
    while (block->barrier_generation == generation) block->go_on();
    return block->barrier_votes[generation & 1];
}

const uint64_t* exchange(uint64_t value) {
    Warp& warp = block->warp();
    const unsigned generation = warp.generation;
    warp.values[generation & 1][block->current % 32] = value;
    if (++warp.arrived == 32) {
        warp.arrived = 0;
        ++warp.generation;
        warp.runnable = warp.live;
        if (++warp.votes > kVotesOfAWait) block->is_active = true;
    } else {
        warp.runnable &= ~block->lane_bit();
    }
    while (warp.generation == generation) block->go_on();
    return warp.values[generation & 1];
}

void* shared_memory(size_t& bytes) { return bytes = block->shared.size(), block->shared_begin; }

void launch(int blocks, int threads, size_t shared_bytes, const std::function<void()>& body) {
    if ((threads % 32 != 0 && threads != 1) || threads > kMaxThreads || blocks < 1 || shared_bytes > 227 * 1024)
        die("a launch that no GPU would take");
    Launch launch{body, blocks, threads, shared_bytes, 0, {}};
    Pool::of_process().run(launch);
}

// ---- bulk copies. A barrier: bytes it waits for, and in its highest bit the parity of its phase ----

namespace {
constexpr uint64_t kPhase = uint64_t{1} << 63;

void check_copy(const void* shared, const void* global, uint32_t bytes) {
    if ((reinterpret_cast<uintptr_t>(shared) | reinterpret_cast<uintptr_t>(global) | bytes) % 16 != 0)
        die("a bulk copy that is not aligned to 16 bytes");
    if (bytes == 0 || !block->holds(shared, bytes)) die("a bulk copy outside of shared memory");
}
}  // namespace

void barrier_init(uint64_t* barrier) { *barrier = 0; }

void barrier_expect(uint64_t* barrier, uint32_t bytes) {
    if ((*barrier & ~kPhase) != 0) die("a barrier is armed twice");
    *barrier += bytes;
}

void barrier_wait(uint64_t* barrier, uint32_t parity) {
    while ((*barrier >> 63) == parity) {
        for (size_t i = 0; i < block->loads.size();) {
            const Load load = block->loads[i];
            if (load.barrier != barrier) {
                ++i;
                continue;
            }
            std::memcpy(load.to, load.from, load.bytes);
            *barrier -= load.bytes;
            block->loads.erase(block->loads.begin() + static_cast<long>(i));
            if ((*barrier & ~kPhase) == 0) *barrier ^= kPhase;
        }
        if ((*barrier >> 63) == parity) yield();
    }
}

void bulk_load(void* to_shared, const void* from, uint32_t bytes, uint64_t* barrier) {
    check_copy(to_shared, from, bytes);
    block->loads.push_back({to_shared, from, bytes, barrier});
}

void bulk_store(void* to, const void* from_shared, uint32_t bytes) {
    check_copy(from_shared, to, bytes);
    block->fibers[block->current].uncommitted.push_back({static_cast<char*>(to), static_cast<const char*>(from_shared), bytes, {}});
}

void bulk_commit() {
    Fiber& self = block->fibers[block->current];
    self.groups.push_back({std::move(self.uncommitted)});
    self.uncommitted.clear();
}

void bulk_wait(int pending, bool written) {
    std::vector<Group>& groups = block->fibers[block->current].groups;
    for (size_t i = 0; i + pending < groups.size(); ++i)
        if (!groups[i].is_read) read(groups[i]);
    while (written && static_cast<int>(groups.size()) > pending) {
        write(groups.front());
        groups.erase(groups.begin());
    }
}

// ---- copies that a thread makes for itself ----

void copy_late(void* to_shared, const void* from) {
    check_copy(to_shared, from, 16);
    block->fibers[block->current].copies.emplace_back(to_shared, from);
}

void end_late_copies() {
    auto& copies = block->fibers[block->current].copies;
    for (const auto& [to, from] : copies) std::memcpy(to, from, 16);
    copies.clear();
}

}  // namespace emulation

#include <sched.h>
#include <setjmp.h>
#include <sys/mman.h>
#include <time.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <thread>
#include <vector>

#include "cuda/device/ptx.cuh"

namespace emulation {
namespace {

constexpr size_t kStackBytes = 128 * 1024;
constexpr int kUninitialized = 0xcd;
// A block sleeps after as many rounds of its fibers in which all that ran waited for somebody else: there are more blocks than cores.
constexpr int kIdleRounds = 8;
constexpr timespec kNap{0, 50'000};
// Votes of a warp since its last pause: with more of them it does not wait, it computes.
constexpr int kVotesOfAWait = 8;

[[noreturn]] void die(const char* what) {
    std::fprintf(stderr, "emulated GPU: %s\n", what);
    std::abort();
}

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
    jmp_buf registers;  // where it goes on. swapcontext would ask the kernel for the signal mask each time
    bool has_begun = false;
    std::vector<Store> uncommitted;
    std::deque<Group> groups;
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

struct Block {
    Place place{};
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    std::vector<Load> loads;
    std::vector<char> shared;
    char* shared_begin = nullptr;
    char* stacks = nullptr;
    int current = 0, live = 0, at_barrier = 0, idle_rounds = 0;
    bool is_active = false, has_paused = false;  // in this round
    unsigned barrier_generation = 0;
    bool barrier_votes[2] = {};  // of the threads at the barrier, by generation
    jmp_buf scheduler;
    const std::function<void()>* body = nullptr;

    void run();
    void go_on();
    void enter(Fiber& fiber);
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

thread_local Block* block = nullptr;

void write(Group& group) {
    for (Store& store : group.stores) std::memcpy(store.to, store.read.data(), store.bytes);
}

void read(Group& group) {
    for (Store& store : group.stores) store.read.assign(store.from, store.from + store.bytes);
    group.is_read = true;
}

void begin_fiber() {
    (*block->body)();
    Fiber& self = block->fibers[block->current];
    if (!self.uncommitted.empty()) die("a thread ends with uncommitted bulk stores");
    for (Group& group : self.groups) {
        if (!group.is_read) die("a thread ends while its bulk stores may still read shared memory");
        write(group);
    }
    block->warp().live &= ~block->lane_bit();
    block->warp().runnable &= ~block->lane_bit();
    --block->live;
    block->release_barrier_if_full();
    block->go_on();
}

// Where this block does nothing but wait, others have their turn, and after some rounds for a while.
void Block::end_round() {
    idle_rounds = has_paused && !is_active ? idle_rounds + 1 : 0;
    is_active = has_paused = false;
    if (idle_rounds >= kIdleRounds)
        nanosleep(&kNap, nullptr);
    else if (idle_rounds > 0)
        sched_yield();
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
    for (size_t i = 0; i < warps.size(); ++i)
        std::fprintf(stderr, "emulated GPU: warp %zu: %d lanes in a vote, live %08x, runnable %08x\n", i, warps[i].arrived, warps[i].live,
                     warps[i].runnable);
    std::fprintf(stderr, "emulated GPU: block %u, thread %d, %d threads live, %d at the barrier\n", place.block.x, current, live,
                 at_barrier);
    die("all threads of a block wait for each other");
}

void Block::enter(Fiber& fiber) {
    if (fiber.has_begun) _longjmp(fiber.registers, 1);
    fiber.has_begun = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack = {stacks + current * kStackBytes, 0, kStackBytes};
    context.uc_link = nullptr;
    makecontext(&context, begin_fiber, 0);
    setcontext(&context);
}

void Block::go_on() {
    if (live == 0) _longjmp(scheduler, 1);
    const int before = current, next = next_runnable();
    if (next == before) return;
    if (_setjmp(fibers[before].registers) != 0) return;
    current = next;
    place.thread.x = static_cast<unsigned>(next);
    enter(fibers[next]);
}

void Block::run() {
    block = this;
    const size_t count = fibers.size();
    stacks =
        static_cast<char*>(mmap(nullptr, count * kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (stacks == MAP_FAILED) die("no memory for stacks");
    live = static_cast<int>(count);
    for (int i = 0; i < live; ++i) warps[i / 32].live |= uint32_t{1} << i % 32;
    for (Warp& warp : warps) warp.runnable = warp.live;
    if (_setjmp(scheduler) == 0) enter(fibers[0]);
    munmap(stacks, count * kStackBytes);
    if (!loads.empty()) die("a block ends with bulk loads that nobody waited for");
}

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
    if ((threads % 32 != 0 && threads != 1) || threads > 1024 || blocks < 1 || shared_bytes > 227 * 1024)
        die("a launch that no GPU would take");
    std::vector<std::thread> workers;
    for (int index = 0; index < blocks; ++index)
        workers.emplace_back([&, index] {
            Block mine;
            mine.place = {{0}, {static_cast<unsigned>(index)}, {static_cast<unsigned>(threads)}, {static_cast<unsigned>(blocks)}};
            mine.fibers = std::vector<Fiber>(threads);
            mine.warps = std::vector<Warp>((threads + 31) / 32);
            mine.shared.assign(shared_bytes + 128, static_cast<char>(kUninitialized));
            mine.shared_begin = mine.shared.data() + (128 - reinterpret_cast<uintptr_t>(mine.shared.data()) % 128) % 128;
            mine.body = &body;
            mine.run();
        });
    for (std::thread& worker : workers) worker.join();
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
    std::deque<Group>& groups = block->fibers[block->current].groups;
    for (size_t i = 0; i + pending < groups.size(); ++i)
        if (!groups[i].is_read) read(groups[i]);
    while (written && static_cast<int>(groups.size()) > pending) {
        write(groups.front());
        groups.pop_front();
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

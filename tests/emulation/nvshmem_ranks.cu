// A program that puts, and programs that put wrongly: nvshmem_ranks SCENARIO NUM_PES. Its processes are the PEs.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "cuda/device/launch.cuh"
#include "cuda/device/ptx.cuh"
#include "nvshmem.h"
#include "nvshmemx.h"

namespace deepep_moe {
namespace {

constexpr int kChunks = 5, kRounds = 12, kMaxPes = 8, kChunkBytes = 3000;
constexpr unsigned long long kPatienceNs = 20'000'000'000, kImpatienceNs = 2'000'000'000;

struct Params {
    char *inbox, *outbox;    // [num_pes][kChunks][kChunkBytes]: from, and to, each PE
    uint64_t *words, *acks;  // [num_pes][kChunks] what has arrived, [num_pes] rounds that the PE has read
    uint64_t* report;        // [2] payload that was not what its sender put; the round in which something did not arrive
    unsigned long long patience_ns;
    bool waits_for_acks, waits_for_words, tests_words, reuses_source;
};

int chunk_of(int pe, int chunk) { return pe * kChunks + chunk; }
char payload(int from, uint64_t round, int chunk, int i) { return static_cast<char>(from * 31 + round * 7 + chunk * 3 + i); }

bool arrives(const uint64_t* word, uint64_t value, unsigned long long patience_ns) {
    const unsigned long long begin = now_ns();
    while (load_acquire(reinterpret_cast<const unsigned long long*>(word)) < value) {
        if (now_ns() - begin > patience_ns) return false;
        pause_ns(100);
    }
    return true;
}

uint64_t* zeros(int count) {
    void* const words = nvshmem_align(16, count * 8);
    cudaMemset(words, 0, count * 8);
    return static_cast<uint64_t*>(words);
}

// A warp for each peer.
void send(const Params& p) {
    const int peer = (nvshmem_my_pe() + 1 + static_cast<int>(threadIdx.x) / 32) % nvshmem_n_pes();
    for (uint64_t round = 1; round <= kRounds; ++round) {
        if (p.waits_for_acks && !arrives(p.acks + peer, round - 1, p.patience_ns)) return;
        __syncwarp();
        for (int chunk = 0; chunk < kChunks; ++chunk) {
            char* const from = p.outbox + chunk_of(peer, p.reuses_source ? 0 : chunk) * kChunkBytes;
            __syncwarp();
            for (int i = static_cast<int>(threadIdx.x) % 32; i < kChunkBytes; i += 32) from[i] = payload(nvshmem_my_pe(), round, chunk, i);
            const int at = chunk_of(nvshmem_my_pe(), chunk);
            nvshmemx_putmem_signal_nbi_warp(p.inbox + at * kChunkBytes, from, kChunkBytes - chunk, p.words + at, round, NVSHMEM_SIGNAL_SET,
                                            peer);
        }
    }
}

void receive(const Params& p) {
    const int peer = (nvshmem_my_pe() + 1 + static_cast<int>(threadIdx.x) / 32) % nvshmem_n_pes();
    for (uint64_t round = 1; round <= kRounds; ++round) {
        const auto wait = [&](int chunk) {
            const bool has_arrived = arrives(p.words + chunk_of(peer, chunk), round, p.patience_ns);
            if (!has_arrived && p.report[1] == 0) p.report[1] = round;
            if (has_arrived && p.tests_words) nvshmem_uint64_test(p.words + chunk_of(peer, chunk), NVSHMEM_CMP_GE, round);
            __syncwarp();
            return has_arrived;
        };
        for (int chunk = kChunks - 1; chunk >= 0; --chunk) {
            if ((p.waits_for_words || chunk == kChunks - 1) && !wait(chunk)) return;
            for (int i = static_cast<int>(threadIdx.x) % 32; i < kChunkBytes - chunk; i += 32)
                if (p.inbox[chunk_of(peer, chunk) * kChunkBytes + i] != payload(peer, round, chunk, i)) p.report[0] = 1;
        }
        for (int chunk = 0; chunk < kChunks; ++chunk)
            if (!wait(chunk)) return;
        if (threadIdx.x % 32 == 0) nvshmemx_signal_op(p.acks + nvshmem_my_pe(), round, NVSHMEM_SIGNAL_SET, peer);
    }
}

// Run both kernels at once, on streams: each waits for the same kernel on the other PEs. Some scenarios leave out a part.
void exchange(const std::string& scenario) {
    const int num_pes = nvshmem_n_pes(), me = nvshmem_my_pe();
    Params p{};
    const size_t box_bytes = static_cast<size_t>(num_pes) * kChunks * kChunkBytes;
    p.inbox = static_cast<char*>(nvshmem_align(128, box_bytes));
    p.outbox = static_cast<char*>(nvshmem_align(128, box_bytes));
    p.words = zeros(num_pes * kChunks);
    p.acks = zeros(num_pes);
    nvshmem_barrier_all();
    uint64_t report[2] = {};
    p.report = report;
    p.patience_ns = scenario == "lost" ? kImpatienceNs : kPatienceNs;
    p.waits_for_acks = scenario != "impatient";
    p.reuses_source = scenario == "reuse";
    p.waits_for_words = scenario != "early";
    p.tests_words = scenario != "unflushed";
    if (nvshmem_ptr(p.inbox, me) != p.inbox || nvshmem_ptr(p.inbox, (me + 1) % num_pes) == p.inbox) std::abort();
    cudaStream_t receiving, sending;
    cudaStreamCreateWithFlags(&receiving, cudaStreamNonBlocking);
    cudaStreamCreateWithPriority(&sending, cudaStreamNonBlocking, 0);
    launch<receive>("receive", 1, 32 * (num_pes - 1), 0, p, receiving);
    launch<send>("send", 1, 32 * (num_pes - 1), 0, p, sending);
    cudaDeviceSynchronize();
    nvshmem_barrier_all();
    const int next = (me + 1) % num_pes;
    std::printf("PE %d: %s, stopped in round %d, %d messages, %d bytes\n", me, report[0] == 0 ? "right" : "wrong",
                static_cast<int>(report[1]), static_cast<int>(emulated_nvshmem_puts(next)), static_cast<int>(emulated_nvshmem_bytes(next)));
    std::fflush(stdout);
    for (void* pointer :
         {static_cast<void*>(p.inbox), static_cast<void*>(p.words), static_cast<void*>(p.outbox), static_cast<void*>(p.acks)})
        nvshmem_free(pointer);
    for (cudaStream_t stream : {receiving, sending}) cudaStreamDestroy(stream);
}

// ---- programs that put wrongly ----

struct WrongParams {
    char *to, *from, *outside;
    uint64_t* words;
    int peer;
    const char* what;
};

void put_wrongly(const WrongParams& p) {
    const std::string what = p.what;
    const auto put = [&](void* to, const void* from, size_t bytes, uint64_t* signal) {
        nvshmemx_putmem_signal_nbi_block(to, from, bytes, signal, 1, NVSHMEM_SIGNAL_SET, p.peer);
    };
    char* const odd = reinterpret_cast<char*>(p.words) + 4;
    if (what == "to") put(p.outside, p.from, 64, p.words);
    if (what == "to end") put(p.to + 1, p.from, kChunkBytes, p.words);
    if (what == "from") put(p.to, p.outside, 64, p.words);
    if (what == "from end") put(p.to, p.from + 1, kChunkBytes, p.words);
    if (what == "signal") put(p.to, p.from, 64, reinterpret_cast<uint64_t*>(p.outside));
    if (what == "odd signal") put(p.to, p.from, 64, reinterpret_cast<uint64_t*>(odd));
    if (what == "signal in payload") put(p.words, p.from, 64, p.words + 1);
    if (what == "no bytes") put(p.to, p.from, 0, p.words);
    if (what == "lanes") put(p.to + threadIdx.x, p.from, 64, p.words);
    if (what == "same bytes") put(p.to, p.from, 64, p.words), put(p.to + 63, p.from, 64, p.words + 1);
    if (what == "same signal") put(p.to, p.from, 64, p.words), put(p.to + 64, p.from, 64, p.words);
    if (what == "freed") put(p.to, p.from, kChunkBytes, p.words);
    for (int i = 0; i < 9 && what == "depth"; ++i) put(p.to + 64 * i, p.from, 64, p.words + i);
    if (threadIdx.x != 0) return;
    if (what == "add") nvshmemx_signal_op(p.words, 1, NVSHMEM_SIGNAL_ADD, p.peer);
    if (what == "itself") nvshmemx_signal_op(p.words, 1, NVSHMEM_SIGNAL_SET, nvshmem_my_pe());
    if (what == "nobody") nvshmemx_signal_op(p.words, 1, NVSHMEM_SIGNAL_SET, nvshmem_n_pes());
}

void go_wrong(const std::string& what) {
    WrongParams p{};
    const bool is_unequal = what == "unequal" && nvshmem_my_pe() == 1;
    p.to = static_cast<char*>(nvshmem_align(16, kChunkBytes + (is_unequal ? 1 : 0)));
    p.from = static_cast<char*>(nvshmem_align(16, kChunkBytes));
    p.words = zeros(64);
    void* outside = nullptr;
    cudaMalloc(&outside, 4096);
    p.outside = static_cast<char*>(outside);
    p.peer = (nvshmem_my_pe() + 1) % nvshmem_n_pes();
    p.what = what.c_str();
    if (what == "gone" && nvshmem_my_pe() == 1) _exit(0);
    if (what == "gone") nvshmem_barrier_all();
    launch<put_wrongly>("put_wrongly", 1, 64, 0, p, nullptr);
    if (what == "freed") nvshmem_free(p.from);
    nvshmem_barrier_all();
    std::printf("PE %d: nobody minds\n", nvshmem_my_pe());
}

// ---- processes ----

void run(const std::string& scenario, nvshmemx_uniqueid_t id, int pe, int num_pes) {
    nvshmemx_init_attr_t attributes = NVSHMEMX_INIT_ATTR_INITIALIZER;
    int major = 0, minor = 0, patch = 0;
    nvshmemx_vendor_get_version_info(&major, &minor, &patch);
    const bool is_set = nvshmemx_set_attr_uniqueid_args(pe, num_pes, &id, &attributes) == 0;
    if (!is_set || major != 3 || minor != 4 || patch != 5 || nvshmemx_init_status() != NVSHMEM_STATUS_NOT_INITIALIZED) std::abort();
    if (nvshmemx_hostlib_init_attr(NVSHMEMX_INIT_WITH_UNIQUEID, &attributes) != 0) {
        std::printf("PE %d: not initialised\n", pe);
        return;
    }
    nvshmemx_init_attr(NVSHMEMX_INIT_WITH_UNIQUEID, &attributes);
    if (nvshmemx_init_status() != NVSHMEM_STATUS_IS_INITIALIZED || nvshmem_my_pe() != pe) std::abort();
    if (scenario.starts_with("wrong "))
        go_wrong(scenario.substr(6));
    else
        exchange(scenario);
}

int run_all(const std::string& scenario, int num_pes) {
    nvshmemx_uniqueid_t id = NVSHMEMX_UNIQUEID_INITIALIZER;
    if (nvshmemx_get_uniqueid(&id) != 0) return 2;
    pid_t children[kMaxPes];
    for (int pe = 0; pe < num_pes; ++pe) {
        children[pe] = fork();
        if (children[pe] != 0) continue;
        run(scenario, id, pe, num_pes);
        std::exit(0);
    }
    for (int left = num_pes, status = 0; left > 0; --left) {
        const pid_t ended = wait(&status);
        if (WIFEXITED(status) && WEXITSTATUS(status) == 0) continue;
        for (int pe = 0; pe < num_pes; ++pe)
            if (children[pe] != ended) kill(children[pe], SIGKILL);
        return 1;
    }
    return 0;
}

}  // namespace
}  // namespace deepep_moe

int main(int, char** arguments) { return deepep_moe::run_all(arguments[1], std::atoi(arguments[2])); }

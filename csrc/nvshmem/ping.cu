// Kernels that call NVSHMEM. Two puts are never ordered, so each word is SET by the put whose data it announces, and is not a counter.
#include <nvshmem.h>
#include <nvshmemx.h>

#include "cuda/device/launch.cuh"
#include "cuda/device/ptx.cuh"
#include "nvshmem/ping.h"

namespace deepep_moe {
namespace {

constexpr unsigned kPingPauseNs = 200;

__device__ unsigned long long ping_word(int from, int to) { return 1ull << 63 | static_cast<unsigned long long>(from) << 32 | to; }

__device__ uint64_t* as_signal(unsigned long long* word) { return reinterpret_cast<uint64_t*>(word); }

__device__ void send_words(const PingParams& p) {
    const int lane = threadIdx.x % 32;
    for (int pe = lane; pe < p.num_pes; pe += 32) p.words.sent[pe] = ping_word(p.my_pe, pe);
    __syncwarp();
    for (int step = 1; step < p.num_pes; ++step) {
        const int pe = (p.my_pe + step) % p.num_pes;
        nvshmemx_putmem_signal_nbi_warp(p.words.received + p.my_pe, p.words.sent + pe, sizeof(unsigned long long),
                                        as_signal(p.words.signals + p.my_pe), 1, NVSHMEM_SIGNAL_SET, pe);
    }
}

__device__ PingState wait_for_word(const PingParams& p, int pe, unsigned long long deadline) {
    unsigned long long* const signal = p.words.signals + pe;
    while (load_acquire(signal) == 0) {
        if (now_ns() >= deadline) return kPingSilent;
        pause_ns(kPingPauseNs);
    }
    // On some transports data is visible only after NVSHMEM has tested the word itself.
    nvshmem_uint64_test(as_signal(signal), NVSHMEM_CMP_GE, 1);
    return load_acquire(p.words.received + pe) == ping_word(pe, p.my_pe) ? kPingArrived : kPingWrong;
}

// One warp.
__global__ void __launch_bounds__(32) ping(const __grid_constant__ PingParams p) {
    const unsigned long long deadline = now_ns() + p.timeout_ns;
    send_words(p);
    for (int pe = threadIdx.x; pe < p.num_pes; pe += 32) p.states[pe] = pe == p.my_pe ? kPingArrived : wait_for_word(p, pe, deadline);
}

}  // namespace

void launch_ping(const PingParams& p, void* stream) { launch<ping>("ping", 1, 32, 0, p, stream); }

}  // namespace deepep_moe

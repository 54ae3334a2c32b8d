// Launchers of the kernels that talk to GPUs of other nodes. Only these are compiled with NVSHMEM's device library. All are asynchronous on
// `stream` (a cudaStream_t) and throw std::runtime_error if CUDA refuses.
#pragma once

#include <cstdint>

namespace deepep_moe {

// State of the word that another PE sends.
enum PingState : int { kPingArrived = 0, kPingSilent, kPingWrong };

// Symmetric words of a ping, all 0 on every PE before the first one launches.
struct PingWords {
    unsigned long long* sent;      // [num_pes] to each PE
    unsigned long long* received;  // [num_pes] from each PE
    unsigned long long* signals;   // [num_pes] 1: the word from that PE has arrived
};

constexpr int64_t ping_bytes(int num_pes) { return 3 * num_pes * static_cast<int64_t>(sizeof(unsigned long long)); }

struct PingParams {
    PingWords words;
    int my_pe, num_pes;
    unsigned long long timeout_ns;
    int* states;  // [num_pes] a PingState each; host memory that the device sees
};

// Puts one word with a signal to every other PE and waits for theirs until the deadline.
void launch_ping(const PingParams& params, void* stream);

}  // namespace deepep_moe

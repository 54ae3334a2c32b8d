// A network that shows every behaviour that NVSHMEM allows. One thread of each process moves its puts: it reads the source late, moves
// pieces of 16 to 64 bytes in any order, and the signal after all pieces of its put. Puts overtake each other, also those to the same PE. A
// forbidden operation ends the process with "emulated NVSHMEM: rank R: ..." on stderr.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace emulation::network {

constexpr int kMaxPes = 64;
constexpr size_t kHeapBytes = size_t{1} << 30;  // of each PE

// DEEPEP_MOE_EMULATED_NETWORK="seed=3,stall_us=200"; an unknown name is a fault. The same for all PEs, but for `seed`.
struct Options {
    int64_t seed = 1;
    int64_t delay_us = 50;           // a put starts up to so much later than it could, one in 8 up to 8 times that
    int64_t stall_us = 0;            // a put in 8 stops all that goes to its PE for up to so long
    int64_t lose = -1;               // a PE that is dead: what is put from or to it is lost,
    int64_t lose_after = 0;          // by each process, after so many that arrive
    int64_t hold_after = INT64_MAX;  // each process, after so many puts, keeps those that follow in flight
    int64_t depth = 256;             // puts in flight from one PE to another
    int64_t flush = 0;               // 1: payload shows once the receiver has called nvshmem_uint64_test and found what it asked for
    int64_t fail_init = 0;           // 1: nvshmemx_hostlib_init_attr fails
};
const Options& options();

[[noreturn]] void fault(const std::string& what);

// Payload from one PE to another that has arrived and does not show yet.
struct Arrivals {
    static constexpr uint64_t kMost = 256;
    std::atomic<uint64_t> num_arrived, num_shown;
    struct {
        uint64_t to, bytes;
    } ranges[kMost];
};

// The memory that all processes map: these words, then the heaps of all PEs, then as much again for payload that is not visible yet.
struct Words {
    std::atomic<int> process[kMaxPes];
    std::atomic<uint64_t> barriers[kMaxPes];   // that the PE has entered
    std::atomic<uint64_t> arguments[kMaxPes];  // of the collective call that it makes
    Arrivals arrivals[kMaxPes][kMaxPes];       // from, to
};
constexpr size_t kWordsBytes = (sizeof(Words) + 4095) / 4096 * 4096;

struct Put {
    int pe;
    size_t to, from, bytes;  // offsets in the heaps; no bytes: a signal alone
    size_t signal;
    uint64_t value;
    std::vector<std::pair<uint32_t, uint32_t>> pieces;  // begin and size of those that have not moved; the last is the next
    std::chrono::steady_clock::time_point due;
};

// Never destroyed: its thread moves puts until the process ends.
class Network {
public:
    Network(int pe, int num_pes, Words& words);
    void post(Put put);
    void wait_until_idle();
    void check_freed(size_t begin, size_t end);  // a fault where a put in flight touches it
    void show_arrivals();                        // to this PE, where they do not show of themselves
    uint64_t bytes_to(int pe) const { return num_bytes_[pe]; }

private:
    using Clock = std::chrono::steady_clock;

    void work();
    Put* next(Clock::time_point& wake);  // one that may go on now, or when to look again
    void move(Put& put, int num_pieces);
    bool announce(const Put& put);  // unless the receiver has too much that does not show yet
    bool is_lost(int pe);
    std::chrono::microseconds up_to(int64_t us);
    std::byte* at(int pe, size_t offset) const { return heaps_ + static_cast<size_t>(pe) * kHeapBytes + offset; }
    std::byte* landing(int pe, size_t offset) const { return at(pe + (options().flush != 0 ? num_pes_ : 0), offset); }

    const int pe_, num_pes_;
    Words& words_;
    std::byte* const heaps_;
    std::mutex mutex_, showing_;
    std::condition_variable changed_;
    std::mt19937_64 random_;
    std::vector<std::unique_ptr<Put>> flying_;
    Clock::time_point stalled_[kMaxPes] = {};
    int64_t num_exposed_ = 0;  // puts from or to the PE that is to die
    int64_t num_posted_ = 0;
    std::atomic<uint64_t> num_bytes_[kMaxPes] = {};
};

}  // namespace emulation::network

#include "network.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>

namespace emulation::network {
namespace {

constexpr int kPieceStep = 16, kMostSteps = 4;  // of a piece, in bytes
constexpr int kMostPieces = 64;                 // that move before another put has its turn
constexpr int kRarely = 8;                      // one put in so many is slow, or stalls its PE

constexpr std::pair<const char*, int64_t Options::*> kOptions[] = {
    {"seed", &Options::seed},   {"delay_us", &Options::delay_us},     {"stall_us", &Options::stall_us},
    {"lose", &Options::lose},   {"lose_after", &Options::lose_after}, {"hold_after", &Options::hold_after},
    {"depth", &Options::depth}, {"flush", &Options::flush},           {"fail_init", &Options::fail_init}};

Options read_options() {
    Options options;
    const char* const given = std::getenv("DEEPEP_MOE_EMULATED_NETWORK");
    std::stringstream rest(given != nullptr ? given : "");
    for (std::string item; std::getline(rest, item, ',');) {
        const size_t equals = item.find('=');
        const auto option =
            std::find_if(std::begin(kOptions), std::end(kOptions), [&](const auto& o) { return o.first == item.substr(0, equals); });
        char* end = nullptr;
        const int64_t value = equals == std::string::npos ? -1 : std::strtoll(item.c_str() + equals + 1, &end, 10);
        if (option == std::end(kOptions) || value < 0 || *end != 0)
            fault("DEEPEP_MOE_EMULATED_NETWORK has '" + item + "'; give NAME=NUMBER of the names in network.h");
        options.*option->second = value;
    }
    return options;
}

bool overlap(size_t a, size_t a_bytes, size_t b, size_t b_bytes) {
    return a_bytes > 0 && b_bytes > 0 && a < b + b_bytes && b < a + a_bytes;
}

// Do both write a byte, payload or signal?
bool collide(const Put& a, const Put& b) {
    return a.pe == b.pe && (overlap(a.to, a.bytes, b.to, b.bytes) || overlap(a.signal, 8, b.to, b.bytes) ||
                            overlap(a.to, a.bytes, b.signal, 8) || a.signal == b.signal);
}

}  // namespace

const Options& options() {
    static const Options read = read_options();
    return read;
}

// ---- what kernels ask for ----

Network::Network(int pe, int num_pes, Words& words)
    : pe_(pe),
      num_pes_(num_pes),
      words_(words),
      heaps_(reinterpret_cast<std::byte*>(&words) + kWordsBytes),
      random_(static_cast<uint64_t>(options().seed) * kMaxPes + static_cast<uint64_t>(pe)) {
    std::thread([this] { work(); }).detach();
}

std::chrono::microseconds Network::up_to(int64_t us) {
    return std::chrono::microseconds(static_cast<int64_t>(random_() % static_cast<uint64_t>(us + 1)));
}

bool Network::is_lost(int pe) {
    const Options& o = options();
    if (o.lose != pe_ && o.lose != pe) return false;
    return num_exposed_++ >= o.lose_after;
}

void Network::post(Put put) {
    const std::lock_guard lock(mutex_);
    const std::string peer = "PE " + std::to_string(put.pe);
    const auto in_flight = std::count_if(flying_.begin(), flying_.end(), [&](const auto& other) { return other->pe == put.pe; });
    if (in_flight >= options().depth)
        fault(std::to_string(in_flight + 1) + " puts to " + peer +
              " are in flight; the queue holds depth=" + std::to_string(options().depth));
    if (overlap(put.to, put.bytes, put.signal, 8)) fault("the signal of a put to " + peer + " lies in its own payload");
    for (const auto& other : flying_)
        if (collide(put, *other)) fault("two puts in flight to " + peer + " write the same bytes or the same signal");
    if (is_lost(put.pe)) return;
    for (uint32_t begin = 0; begin < put.bytes;) {
        const uint32_t wished = kPieceStep * (1 + random_() % kMostSteps);
        const uint32_t bytes = static_cast<uint32_t>(std::min<size_t>(wished, put.bytes - begin));
        put.pieces.emplace_back(begin, bytes);
        begin += bytes;
    }
    std::shuffle(put.pieces.begin(), put.pieces.end(), random_);
    const auto now = Clock::now();
    put.due = now + up_to(options().delay_us * (random_() % kRarely == 0 ? kRarely : 1));
    if (num_posted_++ >= options().hold_after) put.due = Clock::time_point::max();
    if (options().stall_us > 0 && random_() % kRarely == 0) stalled_[put.pe] = now + up_to(options().stall_us);
    flying_.push_back(std::make_unique<Put>(std::move(put)));
    changed_.notify_all();
}

void Network::wait_until_idle() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return flying_.empty(); });
}

void Network::check_freed(size_t begin, size_t end) {
    const std::lock_guard lock(mutex_);
    for (const auto& put : flying_)
        if (overlap(put->to, put->bytes, begin, end - begin) || overlap(put->from, put->bytes, begin, end - begin) ||
            overlap(put->signal, 8, begin, end - begin))
            fault("memory is freed that a put to PE " + std::to_string(put->pe) + " still reads or writes; wait until it has arrived");
}

void Network::show_arrivals() {
    const std::lock_guard lock(showing_);
    for (int from = 0; from < num_pes_; ++from) {
        Arrivals& arrivals = words_.arrivals[from][pe_];
        for (uint64_t number = arrivals.num_shown; number < arrivals.num_arrived; arrivals.num_shown = ++number) {
            const auto [to, bytes] = arrivals.ranges[number % Arrivals::kMost];
            std::memcpy(at(pe_, to), landing(pe_, to), bytes);
        }
    }
}

// ---- what its thread does ----

Put* Network::next(Clock::time_point& wake) {
    const auto now = Clock::now();
    Put* found = nullptr;
    wake = Clock::time_point::max();
    uint64_t num_ready = 0;
    for (const auto& put : flying_) {
        const auto start = std::max(put->due, stalled_[put->pe]);
        if (start > now)
            wake = std::min(wake, start);
        else if (random_() % ++num_ready == 0)
            found = put.get();
    }
    return found;
}

void Network::move(Put& put, int num_pieces) {
    for (; num_pieces > 0 && !put.pieces.empty(); --num_pieces) {
        const auto [begin, bytes] = put.pieces.back();
        std::memcpy(landing(put.pe, put.to + begin), at(pe_, put.from + begin), bytes);
        put.pieces.pop_back();
    }
}

bool Network::announce(const Put& put) {
    if (options().flush != 0 && put.bytes > 0) {
        Arrivals& arrivals = words_.arrivals[pe_][put.pe];
        const uint64_t number = arrivals.num_arrived;
        if (number - arrivals.num_shown == Arrivals::kMost) return false;
        arrivals.ranges[number % Arrivals::kMost] = {put.to, put.bytes};
        arrivals.num_arrived = number + 1;
    }
    __atomic_store_n(reinterpret_cast<uint64_t*>(at(put.pe, put.signal)), put.value, __ATOMIC_RELEASE);
    num_bytes_[put.pe] += put.bytes;
    return true;
}

void Network::work() {
    std::unique_lock lock(mutex_);
    while (true) {
        Clock::time_point wake;
        Put* const put = next(wake);
        if (put == nullptr && wake == Clock::time_point::max()) {
            changed_.wait(lock);
        } else if (put == nullptr) {
            changed_.wait_until(lock, wake);
        } else if (!put->pieces.empty()) {
            const int num_pieces = 1 + static_cast<int>(random_() % kMostPieces);
            lock.unlock();
            move(*put, num_pieces);
            lock.lock();
            if (put->pieces.empty()) put->due = Clock::now() + up_to(options().delay_us);
        } else if (announce(*put)) {
            std::erase_if(flying_, [&](const auto& each) { return each.get() == put; });
            changed_.notify_all();
        } else {
            put->due = Clock::now() + std::chrono::milliseconds(1);
        }
    }
}

}  // namespace emulation::network

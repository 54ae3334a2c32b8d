#include "runtime/shm/low_latency.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>

#include "common/signature.h"
#include "cpu/wait.h"

namespace deepep_moe {
namespace {

constexpr uint64_t kMagic = 0x64656570'4c4c0001;  // plus the rank; stored in the rank's own word of `resumed`, which no peer writes
constexpr const char* kEntry = "entry into the call";
constexpr const char* kFromHandler = "a signal's handler calls the buffer whose call it interrupts; make the call once that one is over";

std::string rank_name(int rank) { return "rank " + std::to_string(rank); }
uint64_t number_of(uint64_t flag) { return flag >> kWhatBits; }
LowLatencyWhat what_of(uint64_t flag) { return LowLatencyWhat::unpacked(LowLatencyWhat::packed_in(flag)); }

}  // namespace

// Holds `sending_`. Python code may move the rows and so run a signal handler, which may call the same buffer.
class ShmLowLatency::Sending {
public:
    explicit Sending(ShmLowLatency& owner) : owner_(owner) {
        if (owner.sender_ == std::this_thread::get_id()) throw ThreadsError(kFromHandler);
        owner.sending_.lock();
        owner.sender_ = std::this_thread::get_id();
    }
    ~Sending() {
        owner_.sender_ = std::thread::id();
        owner_.sending_.unlock();
    }
    Sending(const Sending&) = delete;
    Sending& operator=(const Sending&) = delete;

private:
    ShmLowLatency& owner_;
};

// The waits of one call.
class ShmLowLatency::Waits final : public PeerMonitor {
public:
    Waits(ShmLowLatency& owner, uint64_t number) : owner_(owner), number_(number) {}

    // Wait until all ranks that take part have entered the call, and return them. Calls `heard(rank)` for each, even if it is masked
    // meanwhile.
    template <class Heard>
    RankSet wait_entered(Heard heard);
    template <class Heard>
    RankSet wait_entered(int64_t* wait_ns, Heard heard);  // adds to wait_ns [num_ranks] how long each rank was waited for
    // Wait until rank `peer` sets `flag` to `wanted`. False: the peer is masked. Throws if the peer is given up or refuses.
    bool wait(std::atomic_ref<uint64_t> flag, uint64_t wanted, int peer, const char* phase);
    void wait_resumed(int peer);

    int num_ranks() const override { return owner_.config_.num_ranks; }
    double timeout_s() const override { return owner_.timeout_s_; }
    uint64_t beat(int) const override { return 0; }
    void beat_self() override {}
    void poll() override {
        is_interrupted_ = true;
        if (owner_.poll_) owner_.poll_();
        is_interrupted_ = false;
    }
    bool is_interrupted() const { return is_interrupted_; }  // by an exception of `poll`
    bool suspect(const Lack& lack) override { return has_left(lack.peer) || owner_.peers_.is_gone(lack.peer); }
    [[noreturn]] void give_up(const Lack& lack) override;
    [[noreturn]] void fail(const Lack& lack) override;

private:
    // Whether the peer has destroyed its buffer. It leaves a word behind: the number of calls it made, plus 1.
    bool has_left(int peer) const {
        const uint64_t left = owner_.left(owner_.rank_, peer).load(std::memory_order_acquire);
        return left != 0 && left <= number_;
    }
    bool is_here(int peer) const {
        return peer == owner_.rank_ || number_of(owner_.turn(number_).entered(peer).load(std::memory_order_acquire)) == number_;
    }
    uint64_t last_entered(int peer) const {
        uint64_t last = 0;
        for (uint64_t turn = 0; turn < kTurns; ++turn)
            last = std::max(last, number_of(owner_.turn(turn).entered(peer).load(std::memory_order_acquire)));
        return last;
    }
    template <class Report>
    void idle(Waiter& waiter, RankSet missing, const Report& report);
    Lack lack(int peer, const char* phase, uint64_t seen) const {
        return {peer, phase, static_cast<int64_t>(number_), static_cast<int64_t>(seen)};
    }

    ShmLowLatency& owner_;
    const uint64_t number_;
    bool is_interrupted_ = false;
};

// Wait a little for `missing`. If ranks are given up, mask them or throw.
template <class Report>
void ShmLowLatency::Waits::idle(Waiter& waiter, RankSet missing, const Report& report) {
    RankSet lost = 0;
    const auto lose = [&](int rank) {
        if (!owner_.mask_stalled_) throw;
        lost = suspect({rank, "", 0, 0}) ? RankSet{1} << rank : missing;  // a deadline that has passed applies to all of them
    };
    try {
        return waiter.idle(report);
    } catch (const TimeoutError& error) {
        lose(error.rank);
    } catch (const PeerError& error) {
        lose(error.rank);
    }
    owner_.masks_ |= lost;
    waiter.progress();
}

template <class Heard>
RankSet ShmLowLatency::Waits::wait_entered(Heard heard) {
    RankSet entered = 0, missing = owner_.ranks_in(number_);
    Waiter waiter(*this);
    const auto report = [&](auto&& tell) {
        for (int peer = 0; peer < num_ranks(); ++peer)
            if (contains(missing, peer)) tell(lack(peer, kEntry, last_entered(peer)));
    };
    for (;;) {
        for (int peer = 0; peer < num_ranks(); ++peer) {
            const RankSet bit = RankSet{1} << peer;
            if (!(missing & bit)) continue;
            if (is_here(peer))
                entered |= bit;
            else if (owner_.takes_part(peer, number_))
                continue;
            missing &= ~bit;
            heard(peer);
        }
        if (missing == 0) return entered;
        idle(waiter, missing, report);
    }
}

template <class Heard>
RankSet ShmLowLatency::Waits::wait_entered(int64_t* wait_ns, Heard heard) {
    const auto began = std::chrono::steady_clock::now();
    return wait_entered([&](int rank) {
        const auto waited = std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - began);
        std::atomic_ref(wait_ns[rank]).fetch_add(waited.count(), std::memory_order_relaxed);
        heard(rank);
    });
}

bool ShmLowLatency::Waits::wait(std::atomic_ref<uint64_t> flag, uint64_t wanted, int peer, const char* phase) {
    if (flag.load(std::memory_order_acquire) == wanted) return true;
    Waiter waiter(*this);
    const auto entered = owner_.turn(number_).entered(peer);
    const auto report = [&](auto&& tell) { tell(lack(peer, phase, number_of(flag.load(std::memory_order_acquire)))); };
    while (flag.load(std::memory_order_acquire) != wanted) {
        if (!owner_.takes_part(peer, number_)) return false;
        owner_.check_refusal(peer, entered.load(std::memory_order_acquire));  // it may have been interrupted after it entered
        idle(waiter, RankSet{1} << peer, report);
    }
    return true;
}

void ShmLowLatency::Waits::wait_resumed(int peer) {
    Waiter waiter(*this);
    const auto word = owner_.resumed(owner_.rank_, peer);
    const auto report = [&](auto&& tell) { tell(Lack{peer, "return to the calls", 1, 0}); };
    while (word.load(std::memory_order_acquire) == 0) waiter.idle(report);
}

void ShmLowLatency::Waits::give_up(const Lack& lack) {
    if (!has_left(lack.peer)) fail(lack);
    throw PeerError(rank_name(owner_.rank_) + " in call " + std::to_string(number_) + ", waiting for " + lack.phase + ": " +
                        rank_name(lack.peer) + kHasLeft,
                    lack.peer);
}

void ShmLowLatency::Waits::fail(const Lack& lack) {
    throw TimeoutError(rank_name(owner_.rank_) + " in call " + std::to_string(number_) + ": " + rank_name(lack.peer) +
                           " did not deliver, " + owner_.peers_.why_silent(lack.peer, owner_.timeout_s_) + "; phase '" + lack.phase +
                           "', expected " + std::to_string(lack.expected) + ", seen " + std::to_string(lack.seen) +
                           owner_.peers_.advice(lack.peer),
                       lack.peer, lack.phase, lack.expected, lack.seen);
}

// ---- beginning and end ----

ShmLowLatency::ShmLowLatency(const LowLatencyConfig& config, int rank, double timeout_s, bool mask_stalled)
    : config_(config),
      layout_(config),
      rank_(rank),
      timeout_s_(timeout_s),
      mask_stalled_(mask_stalled),
      peers_(config.num_ranks, rank, layout_.total_bytes) {
    workspaces_[rank] = peers_.memory(rank);
    resumed(rank, rank).store(kMagic + rank, std::memory_order_release);
}

int64_t ShmLowLatency::free() const {
    int64_t bytes = 0;
    for (int turn = 0; turn < kTurns; ++turn)
        bytes += peers_.give_back(layout_.turns + turn * layout_.turn_bytes + layout_.areas, layout_.turn_bytes - layout_.areas);
    return bytes;
}

ShmLowLatency::~ShmLowLatency() {
    if (!peers_.is_owner()) return;
    for (int peer = 0; peer < config_.num_ranks; ++peer)
        if (workspaces_[peer] != nullptr) left(peer, rank_).store(num_sent_ + 1, std::memory_order_release);
}

void ShmLowLatency::connect(const std::vector<std::string>& paths, const std::vector<int>& pids) {
    peers_.connect(paths, pids);
    for (int rank = 0; rank < config_.num_ranks; ++rank) {
        workspaces_[rank] = peers_.memory(rank);
        if (resumed(rank, rank).load(std::memory_order_acquire) != kMagic + rank) throw_foreign_segment(paths[rank], rank);
    }
}

// ---- calls ----

ShmLowLatency::Fate ShmLowLatency::fate(uint64_t number) const {
    const uint64_t known = fates_[number % kTurns];
    return known >> 2 == number ? static_cast<Fate>(known & 3) : Fate::kHeard;
}

RankSet ShmLowLatency::ranks_in(uint64_t number) const {
    RankSet ranks = 0;
    for (int rank = 0; rank < config_.num_ranks; ++rank)
        if (takes_part(rank, number)) ranks |= RankSet{1} << rank;
    return ranks;
}

// Return the number of the next call, once it may be sent because nobody reads its turn any more.
uint64_t ShmLowLatency::begin() {
    const uint64_t number = num_sent_ + 1;
    if (number > kMaxInFlight) {
        const uint64_t before_last = number - kMaxInFlight;
        if (fate(before_last) == Fate::kOpen) throw std::logic_error("the call before last was not received yet");
        if (fate(before_last) == Fate::kFailed) Waits(*this, before_last).wait_entered([](int) {});
    }
    set_fate(number, Fate::kOpen);
    num_sent_ = number;
    return number;
}

void ShmLowLatency::publish_refusal(uint64_t number, RankSet ranks, const std::string& text) {
    LowLatencyWhat what{};
    what.is_refused = true;
    visit(ranks, [&](int peer) {
        copy_text(reason(peer, rank_, number), kMaxReasonBytes, text);
        turn(peer, number).entered(rank_).store(what.flag(number, 0), std::memory_order_release);
    });
    set_fate(number, Fate::kFailed);
}

void ShmLowLatency::refuse(const std::string& text) {
    peers_.check_owner();
    const Sending sending(*this);
    if (const RankSet unserved = unserved_.exchange(0)) return publish_refusal(num_sent_, unserved, text);
    const uint64_t number = begin();
    publish_refusal(number, ranks_in(number), text);
}

void ShmLowLatency::send(ShmLowLatencyCall& call) {
    const Sending sending(*this);
    call.number = begin();
    const RankSet ranks = ranks_in(call.number);
    Waits waits(*this, call.number);
    RankSet served = 0;
    try {
        send_rows(call, ranks, waits, served);
    } catch (const std::exception& error) {
        const RankSet unserved = ranks_in(call.number) & ~served;
        if (note_interrupt(call, waits))
            unserved_ = unserved;  // the caller knows the reason, and passes it to `refuse`
        else
            publish_refusal(call.number, unserved, told(error));
        set_fate(call.number, Fate::kFailed);
        throw;
    }
}

bool ShmLowLatency::note_interrupt(const ShmLowLatencyCall& call, const Waits& waits) {
    if (!waits.is_interrupted() && !call.rows.is_interrupted()) return false;
    interrupted_[call.number % kTurns] = call.number;
    return true;
}

// `served`: out, the ranks that have the whole call, set even if this throws.
void ShmLowLatency::send_rows(const ShmLowLatencyCall& call, RankSet ranks, Waits& waits, RankSet& served) {
    const uint64_t flag = call.flag(call.number);
    const auto arrive = [&](int rank) {
        turn(rank, call.number).arrived(rank_).store(call.arrived(call.number), std::memory_order_release);
        served |= RankSet{1} << rank;
    };
    call.rows.write(call.number, ranks);
    visit(ranks, [&](int rank) { turn(rank, call.number).entered(rank_).store(flag, std::memory_order_release); });
    if (call.what.operation == LowLatencyOperation::kDispatch || !call.what.has_weights) return visit(ranks, arrive);
    // A rank's sums are sent once its weights have come, even if others are late. A rank that does something else learns so when it
    // receives.
    waits.wait_entered(call.wait_ns, [&](int rank) {
        const auto word_of = [&](int peer) { return turn(call.number).entered(peer).load(std::memory_order_acquire); };
        if (word_of(rank) != word_of(rank_)) return;
        call.rows.write_weighted(call.number, RankSet{1} << rank);
        arrive(rank);
    });
}

// Throw if the entry word of `peer` says that it has refused the call.
void ShmLowLatency::check_refusal(int peer, uint64_t entered) const {
    if (!what_of(entered).is_refused) return;
    const char* text = reason(rank_, peer, number_of(entered));
    throw PeerError(rank_name(peer) + " did not make its call: " + std::string(text, strnlen(text, kMaxReasonBytes)), peer);
}

void ShmLowLatency::check_entries(uint64_t number, RankSet ranks, const LowLatencyWhat& own) const {
    std::string others, others_along;
    const auto dispatch_of = [&](uint64_t entered) { return LowLatencyWhat::dispatch_near(number, LowLatencyWhat::value_in(entered)); };
    const uint64_t own_entered = turn(number).entered(rank_).load(std::memory_order_acquire);
    for (int peer = 0; peer < config_.num_ranks; ++peer) {
        if (!contains(ranks, peer)) continue;
        const uint64_t entered = turn(number).entered(peer).load(std::memory_order_acquire);  // read once: a refusal may replace it
        check_refusal(peer, entered);
        const LowLatencyWhat what = what_of(entered);
        if (what.packed() != own.packed()) others += "; " + rank_name(peer) + ": " + describe(what);
        if (dispatch_of(entered) != dispatch_of(own_entered))
            others_along += "; " + rank_name(peer) + ": " + describe_combine(dispatch_of(entered));
    }
    const std::string start = "ranks make different calls: " + rank_name(rank_) + ": ";
    if (!others.empty()) throw MismatchError(start + describe(own) + others);
    if (own.operation == LowLatencyOperation::kCombine && !others_along.empty())
        throw MismatchError(start + describe_combine(dispatch_of(own_entered)) + others_along);
}

void ShmLowLatency::receive(const ShmLowLatencyCall& call) {
    Waits waits(*this, call.number);
    const char* const phase = call.what.operation == LowLatencyOperation::kDispatch ? "dispatch rows" : "combine rows";
    Fate fate = Fate::kFailed;
    try {
        const RankSet entered = waits.wait_entered(call.wait_ns, [](int) {});
        fate = Fate::kHeard;
        check_entries(call.number, entered, call.what);
        RankSet arrived = 0;
        std::vector<int> values(config_.num_ranks);
        visit(entered, [&](int source) {
            values[source] = LowLatencyWhat::value_in(turn(call.number).entered(source).load(std::memory_order_relaxed));
            if (waits.wait(turn(call.number).arrived(source), call.arrived(call.number), source, phase)) arrived |= RankSet{1} << source;
        });
        call.rows.read(call.number, entered, arrived, values);
    } catch (...) {
        note_interrupt(call, waits);
        set_fate(call.number, fate);
        throw;
    }
    set_fate(call.number, fate);
}

void ShmLowLatency::run(ShmLowLatencyCall call, bool sends, bool receives) {
    peers_.check_owner();
    if (sends) send(call);
    if (receives) receive(call);
}

// ---- ranks that are gone ----

// Clear what a rank has sent, because it may repeat calls that it has already sent.
void ShmLowLatency::forget_flags(int source) {
    for (uint64_t index = 0; index < kTurns; ++index) {
        turn(index).entered(source).store(0, std::memory_order_relaxed);
        turn(index).arrived(source).store(0, std::memory_order_relaxed);
    }
}

void ShmLowLatency::mask(int rank, bool masked) {
    peers_.check_owner();
    const Sending sending(*this);
    const RankSet bit = RankSet{1} << rank;
    if (masked) {
        masks_ |= bit;
        return;
    }
    const uint64_t next = num_sent_ + 1;
    forget_flags(rank);
    first_calls_[rank] = next;
    masks_ &= ~bit;
    resumed(rank, rank_).store(next + 1, std::memory_order_release);
}

void ShmLowLatency::rejoin() {
    peers_.check_owner();
    const Sending sending(*this);
    std::array<uint64_t, kLowLatencyMaxHostRanks> told{};
    for (int peer = 0; peer < config_.num_ranks; ++peer)
        if (peer != rank_) Waits(*this, num_sent_).wait_resumed(peer);
    for (int peer = 0; peer < config_.num_ranks; ++peer)
        if (peer != rank_) told[peer] = resumed(rank_, peer).exchange(0, std::memory_order_acq_rel);
    const int first = rank_ == 0 ? 1 : 0;
    for (int peer = first + 1; peer < config_.num_ranks; ++peer)
        if (peer != rank_ && told[peer] != told[first])
            throw MismatchError("ranks take " + rank_name(rank_) + " back between different calls: " + rank_name(first) + " at call " +
                                std::to_string(told[first] - 1) + ", " + rank_name(peer) + " at call " + std::to_string(told[peer] - 1));
    if (config_.num_ranks > 1) num_sent_ = told[first] - 2;
    for (auto& call : first_calls_) call = num_sent_ + 1;  // earlier calls are over, even for a rank that still waits in one
    masks_ = 0;
    for (auto& fate : fates_) fate = 0;
    for (auto& call : interrupted_) call = 0;
}

}  // namespace deepep_moe

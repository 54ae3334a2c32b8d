#include "runtime/shm/exchange.h"

#include <cstdint>
#include <cstring>
#include <new>
#include <thread>

namespace deepep_moe {
namespace {

constexpr char kWentOn[] = " left this call with an error and went on; see its output for the error";

// Calls run(index) for each index below `count`, the last one on the calling thread. Threads are started per call (some 20 us each):
// nothing is left behind for a fork to break. The first exception, by index, is rethrown.
template <typename Run>
void run_on_threads(int count, const Run& run) {
    std::vector<std::exception_ptr> errors(count);
    const auto guarded = [&](int index) {
        try {
            run(index);
        } catch (...) {
            errors[index] = std::current_exception();
        }
    };
    {
        std::vector<std::jthread> threads;
        threads.reserve(count - 1);
        for (int index = 0; index < count - 1; ++index) threads.emplace_back(guarded, index);
        guarded(count - 1);
    }
    for (const auto& error : errors) {
        if (error) std::rethrow_exception(error);
    }
}

std::string call_name(uint64_t sequence) { return "call " + std::to_string(sequence); }

}  // namespace

// Allows one call at a time, because two threads in one buffer would mix their sequence numbers.
class ShmExchange::Call {
public:
    explicit Call(ShmExchange& owner) : owner_(owner) {
        if (owner.busy_.exchange(true)) throw CallError(kTwoThreads);
        owner.stopped_ = nullptr;
    }
    ~Call() { owner_.busy_.store(false); }

private:
    ShmExchange& owner_;
};

ShmExchange::ShmExchange(const WorkspaceConfig& config, int rank, double timeout_s)
    : config_(config), layout_(config), rank_(rank), timeout_s_(timeout_s), peers_(config.num_ranks, rank, layout_.total_bytes()) {
    auto* header = new (base(rank)) SegmentHeader{};
    header->magic = kSegmentMagic;
    header->rank = rank;
    header->state.store(SegmentState::kAlive, std::memory_order_release);
}

ShmExchange::~ShmExchange() {
    if (peers_.is_owner()) header(rank_).state.store(SegmentState::kDestroyed, std::memory_order_release);
}

void ShmExchange::connect(const std::vector<std::string>& paths, const std::vector<int>& pids) {
    peers_.connect(paths, pids);
    for (int rank = 0; rank < config_.num_ranks; ++rank)
        if (header(rank).magic != kSegmentMagic || header(rank).rank != rank) throw_foreign_segment(paths[rank], rank);
}

// ---- entering a call ----

Entry& ShmExchange::begin_entry(const Signature& signature) {
    peers_.check_owner();
    ++sequence_;
    Entry& own_entry = entry(rank_);
    own_entry.sequence.store(0);  // so that late readers of the old entry notice
    std::atomic_thread_fence(std::memory_order_release);
    own_entry.refused = 0;
    own_entry.signature = signature;
    own_entry.num_recv_rows = -1;
    return own_entry;
}

void ShmExchange::publish(Entry& own_entry) {
    own_entry.sequence.store(sequence_, std::memory_order_release);
    header(rank_).entered.store(sequence_, std::memory_order_release);
}

void ShmExchange::publish_refusal(Entry& own_entry, const std::string& message, int cause) {
    own_entry.refused = 1 + cause;
    copy_text(own_entry.message, kMessageBytes, message);
    publish(own_entry);
}

void ShmExchange::refuse(const std::string& message, int cause) {
    const Call call(*this);
    publish_refusal(begin_entry({}), message, cause);
}

void ShmExchange::enter(Entry& own_entry) {
    publish(own_entry);
    wait_entered();
    check_entries();
}

void ShmExchange::wait_entered() {
    Waiter waiter(*this);
    const auto report_lacks = [&](auto&& report) {
        for (int peer = 0; peer < config_.num_ranks; ++peer) {
            const uint64_t seen = header(peer).entered.load(std::memory_order_acquire);
            if (seen < sequence_) report(Lack{peer, "entry into the call", static_cast<int64_t>(sequence_), static_cast<int64_t>(seen)});
        }
    };
    const auto all_here = [&] {
        bool all = true;
        report_lacks([&](const Lack&) { all = false; });
        return all;
    };
    while (!all_here()) waiter.idle(report_lacks);
}

void ShmExchange::check_entries() const {
    std::string mismatch;
    for (int peer = 0; peer < config_.num_ranks; ++peer) {
        const Entry& theirs = entry(peer);
        // A rank that gave up on this call will not take part in it, although it has entered.
        if (header(peer).failure.sequence.load(std::memory_order_acquire) == sequence_) pass_on({peer, "entry into the call", 0, 0}, peer);
        const int refused = theirs.refused;
        const bool is_refused = refused != 0;
        const std::string message(theirs.message, is_refused ? strnlen(theirs.message, kMessageBytes) : 0);
        const Signature signature = theirs.signature;
        std::atomic_thread_fence(std::memory_order_acquire);
        if (theirs.sequence.load(std::memory_order_acquire) != sequence_)
            throw PeerError("rank " + std::to_string(peer) + " left " + call_name(sequence_) + " with an error and went on to " +
                                call_name(header(peer).entered) + "; see its output for the error",
                            peer);
        if (is_refused) throw PeerError("rank " + std::to_string(peer) + " did not make its call: " + message, peer, refused - 1);
        if (!(signature == entry(rank_).signature)) mismatch += "; rank " + std::to_string(peer) + ": " + describe(signature);
    }
    if (!mismatch.empty())
        throw MismatchError("ranks make different calls: rank " + std::to_string(rank_) + ": " + describe(entry(rank_).signature) +
                            mismatch);
}

// ---- checks during a wait ----

bool ShmExchange::suspect(const Lack& lack) {
    const SegmentHeader& theirs = header(lack.peer);
    if (theirs.state.load(std::memory_order_acquire) == SegmentState::kDestroyed) return true;
    if (theirs.entered.load(std::memory_order_acquire) > sequence_) return true;
    if (peers_.is_gone(lack.peer)) return true;
    // A peer that only waits for another rank is not to blame, but the failure that it has found can be passed on.
    for (int peer = 0; peer < config_.num_ranks; ++peer)
        if (header(peer).failure.sequence.load(std::memory_order_acquire) == sequence_) return true;
    return false;
}

std::string ShmExchange::where(const Lack& lack) const {
    return "rank " + std::to_string(rank_) + " in " + call_name(sequence_) + ", waiting for " + lack.phase + ": rank ";
}

void ShmExchange::pass_on(const Lack& lack, int peer) const {
    const FailureRecord& theirs = header(peer).failure;
    const int culprit = theirs.culprit;
    const int64_t expected = theirs.expected, seen = theirs.seen;
    const std::string phase(theirs.phase, strnlen(theirs.phase, sizeof(theirs.phase)));
    const std::string reason(theirs.reason, strnlen(theirs.reason, kMessageBytes));
    std::atomic_thread_fence(std::memory_order_acquire);
    // The peer may have gone on meanwhile, and failed again.
    if (theirs.sequence.load(std::memory_order_acquire) != sequence_) throw PeerError(where(lack) + std::to_string(peer) + kWentOn, peer);
    if (culprit == peer) throw PeerError(where(lack) + std::to_string(peer) + " left its call: " + reason, peer);
    throw TimeoutError(where(lack) + std::to_string(peer) + " gave up on rank " + std::to_string(culprit) + " in phase '" + phase +
                           "' (expected " + std::to_string(expected) + ", seen " + std::to_string(seen) + ")",
                       culprit, phase, expected, seen);
}

void ShmExchange::give_up(const Lack& lack) {
    for (int peer = 0; peer < config_.num_ranks; ++peer)
        if (header(peer).failure.sequence.load(std::memory_order_acquire) == sequence_) pass_on(lack, peer);
    const std::string who = where(lack) + std::to_string(lack.peer);
    if (header(lack.peer).state.load(std::memory_order_acquire) == SegmentState::kDestroyed) throw PeerError(who + kHasLeft, lack.peer);
    if (header(lack.peer).entered.load(std::memory_order_acquire) > sequence_) throw PeerError(who + kWentOn, lack.peer);
    fail(lack);
}

// Record a failure of this call. Only the first one counts.
template <class Write>
void ShmExchange::record_failure(const Write& write) {
    const std::lock_guard lock(failing_);
    FailureRecord& failure = header(rank_).failure;
    if (failure.sequence.load() == sequence_) return;
    failure.sequence.store(0);
    std::atomic_thread_fence(std::memory_order_release);
    write(failure);
    failure.sequence.store(sequence_);
}

void ShmExchange::fail(const Lack& lack) {
    record_failure([&](FailureRecord& failure) {
        failure.culprit = lack.peer;
        failure.expected = lack.expected;
        failure.seen = lack.seen;
        copy_text(failure.phase, sizeof(failure.phase), lack.phase);
    });
    const std::string why = peers_.why_silent(lack.peer, timeout_s_);
    throw TimeoutError("rank " + std::to_string(rank_) + " in " + call_name(sequence_) + ": rank " + std::to_string(lack.peer) +
                           " did not deliver, " + why + "; phase '" + lack.phase + "', expected " + std::to_string(lack.expected) +
                           ", seen " + std::to_string(lack.seen) + peers_.advice(lack.peer),
                       lack.peer, lack.phase, lack.expected, lack.seen);
}

void ShmExchange::abandon(const std::string& reason) {
    const Call call(*this);
    if (entry(rank_).refused != 0) return;  // the peers know already
    bool has_ended = header(rank_).ended.load() == sequence_;
    if (!has_ended) {
        record_failure([&](FailureRecord& failure) {
            failure.culprit = rank_;
            copy_text(failure.reason, kMessageBytes, reason);
        });
        for (int peer = 0; peer < config_.num_ranks; ++peer) has_ended |= header(peer).ended.load() >= sequence_;
    }
    if (has_ended) publish_refusal(begin_entry({}), reason);
}

// Let the caller interrupt a wait. An exception of `poll_` ends the waits of all threads of the call.
void ShmExchange::poll() {
    const std::lock_guard lock(failing_);
    if (stopped_) std::rethrow_exception(stopped_);
    if (!poll_) return;
    try {
        poll_();
    } catch (...) {
        stopped_ = std::current_exception();
        throw;
    }
}

// ---- calls ----

Ring ShmExchange::ring(int owner, int source, int channel) const {
    return {reinterpret_cast<RingControl*>(base(owner) + layout_.control(source, channel)), base(owner) + layout_.ring(source, channel)};
}

Channel ShmExchange::channel(int index) {
    Channel channel{config_, rank_, index, static_cast<uint32_t>(sequence_), layout_.ring_bytes(), {}, {}, this};
    for (int peer = 0; peer < config_.num_ranks; ++peer) {
        channel.outbox[peer] = ring(peer, rank_, index);
        channel.inbox[peer] = ring(rank_, peer, index);
    }
    return channel;
}

template <class Params>
void ShmExchange::run_channels(const Params& params) {
    run_on_threads(config_.num_channels, [&](int index) { move_channel(params, channel(index)); });
    end_call();
}

// A rank that leaves a call looks for peers that have ended it, and these look for such a rank, so at least one of them sees the other.
void ShmExchange::end_call() {
    header(rank_).ended.store(sequence_);
    for (int peer = 0; peer < config_.num_ranks; ++peer)
        if (header(peer).failure.sequence.load() == sequence_) pass_on({peer, "the end of the call", 0, 0}, peer);
}

PlanResult ShmExchange::plan(const PlanParams& params) {
    const Call call(*this);
    Entry& own_entry = begin_entry(params.signature);
    own_entry.num_recv_rows = params.num_recv_rows_bound;
    try {
        count_own(params.layout);
    } catch (const std::exception& error) {
        publish_refusal(own_entry, describe(error), dynamic_cast<const NoExpertError*>(&error) != nullptr ? kNoExpert : 0);
        throw;
    }
    std::memcpy(const_cast<int32_t*>(counts(rank_)), own_counts_.data(), own_counts_.size() * sizeof(int32_t));
    enter(own_entry);
    const PlanResult result = read_counts(params);
    const std::optional<CapacityError> exceeded = exceeded_bound(params.signature.expert_alignment, params.signature.layout);
    std::atomic_thread_fence(std::memory_order_acquire);
    check_entries();  // again, to be sure that the values just read are of this call
    if (exceeded) throw *exceeded;
    return result;
}

void ShmExchange::count_own(const LayoutParams& params) {
    own_counts_.resize(static_cast<size_t>(config_.num_channels) * (config_.num_ranks + config_.num_experts));
    int32_t* per_rank = own_counts_.data();
    int32_t* per_expert = per_rank + config_.num_channels * config_.num_ranks;
    run_on_threads(config_.num_channels, [&](int index) {
        count_tokens(config_, params, channel_range(params.num_tokens, index, config_.num_channels),
                     {per_rank + index * config_.num_ranks, per_expert + index * config_.num_experts});
    });
}

// Every rank checks the bounds of all ranks, so that all of them stop.
std::optional<CapacityError> ShmExchange::exceeded_bound(int expert_alignment, Layout layout) const {
    const int experts_per_rank = config_.num_experts / config_.num_ranks;
    for (int rank = 0; rank < config_.num_ranks; ++rank) {
        const int64_t rank_bound = entry(rank).num_recv_rows, bound = rank_bound < 0 ? INT32_MAX : rank_bound;
        int64_t num_rows = 0;
        for (int expert = rank * experts_per_rank; expert < (rank + 1) * experts_per_rank && layout == Layout::kExpert; ++expert) {
            int64_t rows = 0;
            for (int source = 0; source < config_.num_ranks; ++source)
                for (int c = 0; c < config_.num_channels; ++c)
                    rows += counts(source)[config_.num_channels * config_.num_ranks + c * config_.num_experts + expert];
            num_rows += align_up(rows, expert_alignment);
        }
        for (int source = 0; source < config_.num_ranks && layout == Layout::kRank; ++source)
            for (int c = 0; c < config_.num_channels; ++c) num_rows += counts(source)[c * config_.num_ranks + rank];
        if (num_rows > bound)
            return CapacityError("rank " + std::to_string(rank) + " would receive " + std::to_string(num_rows) + " rows, more than " +
                                     (rank_bound < 0 ? std::string("a buffer can number (2^31 - 1); dispatch fewer tokens")
                                                     : "its num_recv_rows of " + std::to_string(bound) + "; give a larger bound or none"),
                                 rank);
    }
    return std::nullopt;
}

PlanResult ShmExchange::read_counts(const PlanParams& params) {
    const int num_ranks = config_.num_ranks, num_channels = config_.num_channels, experts_per_rank = config_.num_experts / num_ranks;
    PlanResult result{0, 0};
    for (int source = 0; source < num_ranks; ++source)
        for (int c = 0; c < num_channels; ++c) {
            const int32_t tokens = counts(source)[c * num_ranks + rank_];
            params.recv_counts[source * num_channels + c] = tokens;
            result.num_recv_tokens += tokens;
        }
    row_begin_.assign(static_cast<size_t>(num_ranks) * num_channels * experts_per_rank, 0);
    int64_t row = 0;
    for (int expert = 0; expert < experts_per_rank; ++expert) {
        const int64_t first = row;
        for (int source = 0; source < num_ranks; ++source)
            for (int c = 0; c < num_channels; ++c) {
                row_begin_[(static_cast<size_t>(source) * num_channels + c) * experts_per_rank + expert] = static_cast<int32_t>(row);
                row += counts(source)[num_channels * num_ranks + c * config_.num_experts + rank_ * experts_per_rank + expert];
            }
        params.num_recv_tokens_per_expert[expert] = static_cast<int32_t>(row - first);
        row = first + static_cast<int64_t>(align_up(row - first, params.signature.expert_alignment));
    }
    result.num_rows = params.signature.layout == Layout::kExpert ? row : result.num_recv_tokens;
    return result;
}

void ShmExchange::dispatch(DispatchParams params) {
    const Call call(*this);
    peers_.check_owner();
    params.row_begin = row_begin_.data();
    run_channels(params);
}

template <class Params>
void ShmExchange::make(const Signature& signature, const Params& params) {
    const Call call(*this);
    enter(begin_entry(signature));
    run_channels(params);
}

template void ShmExchange::make(const Signature& signature, const DispatchParams& params);
template void ShmExchange::make(const Signature& signature, const CombineParams& params);

}  // namespace deepep_moe

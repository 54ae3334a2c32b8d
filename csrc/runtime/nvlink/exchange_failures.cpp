// Raises what the kernels of an exchange have reported, in terms of its calls, and settles.
#include <algorithm>

#include "runtime/nvlink/exchange.h"

namespace deepep_moe {
namespace {

// These words of the state are cleared after a failure, so that the next call starts afresh.
constexpr size_t kStateBytes = sizeof(GpuState) - offsetof(GpuState, gave_up);

}  // namespace

int64_t NvlinkExchange::settle() {
    const DeviceGuard guard(device_);
    check_cuda(cudaDeviceSynchronize(), "the GPU failed");
    failures_.forget(host_->failure, state_words(), kStateBytes);
    is_told_ = true;
    void_plan_ = num_plans_;
    unsigned long long sequence = 0;
    failures_.read(&sequence, &state_->sequence, sizeof(sequence));
    return static_cast<int64_t>(sequence);
}

void NvlinkExchange::check() {
    if (!deepep_moe::has_failed(host_->failure)) return;
    const DeviceGuard guard(device_);
    const auto is_done = [&] { return last_.is_done() && streams_.is_done() && (rail_ == nullptr || rail_->is_done()); };
    const GpuFailure failure = failures_.take(host_->failure, state_words(), kStateBytes, is_done);
    void_plan_ = num_plans_;
    if (failure.kind == kExceededBound) {
        lack_ = failure;
        is_told_ = rail_ == nullptr || host_->counts.lacking != num_plans_;  // a later call has told them
    }
    raise(in_calls(origin(failure), rank_));
}

void NvlinkExchange::check_untold() {
    if (!is_told_) raise(lack_);
}

// Follow a chain of refusals to the rank that refused first. Stop where that rank's stamp has not arrived yet; stamps arrive in any order.
GpuFailure NvlinkExchange::origin(GpuFailure f) const {
    for (int hops = 0; f.kind == kPeerRefused && hops < config_.num_sources(); ++hops) {
        const GpuStamp stamp = stamp_of(f.peer, f.expected);
        if (stamp.reason[0] != '\0' || stamp.why.kind != kPeerRefused) break;
        const int peer = numbers_.peer(numbers_.of(f.peer, stamp.why.peer));
        if (peer < 0) break;
        f = stamp.why;
        f.peer = peer;
    }
    return f;
}

// Convert `expected` and `seen` from flag values to call numbers, for phases whose message speaks of calls.
GpuFailure NvlinkExchange::in_calls(GpuFailure f, int reporter) const {
    const auto phase = static_cast<GpuPhase>(f.phase);
    if (!ends_wait(f.kind) || (phase != GpuPhase::kEntry && phase != GpuPhase::kCounts && phase != GpuPhase::kRailEntry)) return f;
    f.expected >>= kValueBits;
    const bool is_known = numbers_.of(reporter, f.peer) == numbers_.of(f.peer);  // both ranks give the peer the same number
    f.seen = phase != GpuPhase::kCounts && is_known ? last_call_of(f.peer) : f.seen >> kValueBits;
    return f;
}

std::string NvlinkExchange::describe(const GpuFailure& f, int reporter) const {
    const auto name_of = [&](int number) { return "rank " + std::to_string(number); };
    const int number = numbers_.of(reporter, f.peer), peer = numbers_.peer(number);
    const auto call_of = [&](int peer) {
        const unsigned long long what = stamp_of(peer, f.expected).what;
        return what == 0 ? "another one" : deepep_moe::describe(unpack(what));
    };
    switch (f.kind) {
        case kMismatch:
            return "ranks make different calls: " + name_of(numbers_.of(reporter)) + ": " + call_of(reporter) + "; " + name_of(number) +
                   ": " + (peer < 0 ? "another one" : call_of(peer));
        case kPeerRefused:
            return peer < 0 ? name_of(number) + " did not make its call" : failures_.peer_refused(peer, reason_of(peer, f.expected));
        case kExceededBound:
            return name_of(number) + " would receive " + std::to_string(f.seen) + " rows, more than its num_recv_rows of " +
                   std::to_string(f.expected) + "; give a larger bound or none";
        default: return failures_.describe(f, reporter);
    }
}

void NvlinkExchange::raise(const GpuFailure& f) const {
    switch (f.kind) {
        case kMismatch: throw MismatchError(describe(f, rank_));
        case kExceededBound: throw CapacityError(describe(f, rank_), numbers_.of(f.peer));
        case kPeerRefused: {
            const GpuStamp stamp = stamp_of(f.peer, f.expected);
            if (stamp.reason[0] == '\0' && stamp.why.kind == kExceededBound)  // in the call before, in a node that this rank is not in
                throw CapacityError(describe(stamp.why, f.peer), numbers_.of(f.peer, stamp.why.peer));
            const bool is_no_expert = stamp.reason[0] == '\0' && stamp.why.kind == kIndexOutOfRange;
            throw PeerError(describe(f, rank_), numbers_.of(f.peer), is_no_expert ? kNoExpert : static_cast<int>(f.seen));
        }
        default: failures_.raise(f);
    }
}

// Returns the reason that `peer` has given for its refusal.
std::string NvlinkExchange::reason_of(int peer, long long call) const {
    const GpuStamp stamp = stamp_of(peer, call);
    return stamp.reason[0] != '\0' ? stamp.reason : Failures::reason_of(stamp.why, describe(in_calls(stamp.why, peer), peer));
}

// Returns the last word with which `peer` has entered a call, as far as this rank knows: the call's number above the entry's value.
unsigned long long NvlinkExchange::last_entry_of(int peer) const {
    unsigned long long entered[2];
    for (int parity = 0; parity < 2; ++parity) {
        const std::byte* word =
            is_rail_peer(peer) ? rail_->entered(parity, peer - kFirstRailPeer) : memory_.of(rank_) + layout_.entered_of(parity, peer);
        failures_.read(&entered[parity], word, sizeof(entered[parity]));
    }
    return std::max(entered[0], entered[1]);
}

long long NvlinkExchange::last_call_of(int peer) const { return static_cast<long long>(last_entry_of(peer) >> kValueBits); }

GpuStamp NvlinkExchange::stamp_of(int peer, long long call) const {
    const auto read = [&](unsigned long long number) {
        GpuStamp stamp{};
        const std::byte* at =
            is_rail_peer(peer) ? rail_->stamp(number, peer - kFirstRailPeer) : memory_.of(rank_) + layout_.stamp_of(number, peer);
        failures_.read(&stamp, at, sizeof(stamp));
        return stamp;
    };
    const GpuStamp stamp = read(static_cast<unsigned long long>(call));
    if (!may_be_overwritten(peer, call)) return stamp;
    // A rank whose GPU has failed refuses all calls that are enqueued, each with a stamp that says why, and may then go on. The oldest
    // stamp left also explains `call`, unless the rank failed in a later call. A lack of room qualifies: the rank finds it with the counts
    // of all ranks, so it was in no later call then. A peer's refusal of this call or an earlier one also qualifies. Other failures may be
    // of a later call.
    const unsigned long long entry = last_entry_of(peer), newest = entry >> kValueBits;
    for (unsigned long long number = newest + 2 - num_stamps(peer); number <= newest; ++number) {
        GpuStamp later = read(number);
        const bool is_refused = is_rail_peer(peer) ? entry % (1u << kValueBits) == 0 : (later.what & kRefusedByGpu) != 0;
        if (!is_refused || later.reason[0] != '\0') continue;
        later.what = 0;  // `what` is about another call
        if (later.why.kind == kExceededBound || (later.why.kind == kPeerRefused && later.why.expected <= call)) return later;
        break;
    }
    const std::string name = "rank " + std::to_string(numbers_.of(peer));
    GpuStamp lost{};
    copy_text(lost.reason, sizeof(lost.reason), "its reason is lost, as " + name + " has entered later calls since; see its output");
    return lost;
}

// Returns whether a later call of `peer` may have reused the slot of this stamp; a rank writes its stamp before its entry. A peer keeps
// num_stamps slots, and gets further ahead only after this rank has entered a later call, or if its GPU has failed; all stamps then say so.
bool NvlinkExchange::may_be_overwritten(int peer, long long call) const {
    unsigned long long entered = 0;
    failures_.read(&entered, &state_->sequence, sizeof(entered));
    return static_cast<long long>(entered) > call && last_call_of(peer) >= call + num_stamps(peer) - 1;
}

// Returns the number of calls whose stamps of `peer` are kept here.
int NvlinkExchange::num_stamps(int peer) const { return is_rail_peer(peer) ? 2 : kStamps; }

}  // namespace deepep_moe

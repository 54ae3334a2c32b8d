#include "runtime/nvlink/exchange.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <stdexcept>

#include "cpu/wait.h"
#include "cuda/launch.h"

namespace deepep_moe {
namespace {

constexpr int64_t kRoundsToLook = 1 << 10;  // rounds of a host wait between two checks of failures and the clock
constexpr int64_t kRoundsToAsk = 1 << 20;   // rounds between two calls of `ask`: some tens of milliseconds
constexpr int kSecondsOfWork = 10;          // time allowed for other work of the GPU before a call

// Returns how many blocks send `num_lanes` top-k entries to the peers, which takes them microseconds.
int lane_blocks(int64_t num_lanes) {
    return static_cast<int>(std::clamp<int64_t>(divide_up(num_lanes, tuning::kLanesOfLaneBlock), 1, tuning::kMaxLaneBlocks));
}

}  // namespace

// ---- calls ----

// Exists while a thread makes a call. Throws CallError if another thread is in a call.
class NvlinkExchange::Step {
public:
    Step(NvlinkExchange& owner, uintptr_t stream) : owner_(owner), guard_(owner.device_) {
        if (owner.busy_.exchange(true)) throw CallError(kTwoThreads);
        owner.last_.begins(stream);
    }
    ~Step() {
        owner_.last_.ends();
        owner_.busy_.store(false);
    }
    Step(const Step&) = delete;

private:
    NvlinkExchange& owner_;
    const DeviceGuard guard_;
};

int64_t NvlinkExchange::dispatch(GpuDispatchCall& call, const CallMode& mode, int64_t* numbers, const Allocate& allocate) {
    const Step step(*this, mode.stream);
    const cudaStream_t stream = as_stream(mode.stream);
    const int num_sms = num_senders(mode, tuning.num_sms);
    const int64_t bound = call.plan.num_recv_rows_bound;
    const bool is_bounded = bound >= 0, starts_apart = mode.is_split || num_sms == 0;
    if (is_bounded && num_sms == 0)
        throw std::invalid_argument("num_sms=0 and num_recv_rows were both given: copy engines need counts on the host; give one of them");
    const int64_t room = is_bounded ? bound : starts_apart ? -1 : guess_of(call, mode).room();
    const bool is_late = mode.is_late && !is_bounded && room >= 0;
    if (room >= 0) allocate(room, !is_bounded);  // before this rank enters the call, as it may fail
    plan(call.plan, call.signature, call.rail, true, stream);
    if (is_bounded || is_late) {
        std::fill_n(numbers, num_handle_numbers(config_.num_sources(), num_local_experts()), -1);
        *numbers = call_number();
    }
    if (room >= 0 && !starts_apart)
        launch(call.params, num_sms, true, stream);
    else
        start(call.params, num_sms, stream);
    if (!starts_apart) join_rail(stream);
    if (is_late) late_plan_ = num_plans_;
    if (is_bounded || is_late) return room;
    return receive_counted(call, mode, num_sms, room, numbers, allocate);
}

int64_t NvlinkExchange::count_late(GpuDispatchCall& call, const CallMode& mode, int64_t* numbers, const Allocate& allocate) {
    const Step step(*this, mode.stream);
    last_.follow(as_stream(mode.stream));
    return receive_counted(call, mode, 1, call.params.num_rows, numbers, allocate);  // SMs have sent its rows already
}

// Wait for the counts. If more than `room` rows come, allocate outputs for them, and receive them unless the call is split. Until then the
// peers' rows wait in the inbox.
int64_t NvlinkExchange::receive_counted(GpuDispatchCall& call, const CallMode& mode, int num_sms, int64_t room, int64_t* numbers,
                                        const Allocate& allocate) {
    try {
        const int64_t num_rows = wait_counts(numbers);
        if (num_sms == 0) send_by_copies(numbers + 1, call.slot_bytes(), as_stream(mode.stream));
        if (num_rows > room) allocate(num_rows, false);
        if (num_rows > room && !mode.is_split) finish(call.params, as_stream(mode.stream));
        guess_of(call, mode).remember(num_rows);
        return num_rows;
    } catch (...) {
        join(last_.running());  // the call ends early: once its rows are sent, its tensors may be freed in the order of its stream
        throw;
    }
}

RowGuess& NvlinkExchange::guess_of(const GpuDispatchCall& call, const CallMode& mode) {
    if (guesses_.size() > kMaxGuesses) guesses_.clear();  // a program may number layers without end
    return guesses_[{mode.layer, call.params.is_expert_layout, call.params.expert_alignment}];
}

void NvlinkExchange::dispatch_cached(const GpuDispatchCall& call, const CallMode& mode) {
    const Step step(*this, mode.stream);
    const int num_sms = num_senders(mode, tuning.num_sms);
    const int64_t* counts = counts_for_copies(call.numbers, num_sms, true);
    plan(call.plan, call.signature, call.rail, true, as_stream(mode.stream));
    move_along(call.params, mode, num_sms, counts, call.slot_bytes());
}

void NvlinkExchange::combine(const GpuCombineCall& call, const CallMode& mode) {
    const Step step(*this, mode.stream);
    const bool is_for_several = call.params.is_expert_layout && config_.num_ranks > 2 && !config_.is_by_lane;
    const int num_sms = num_senders(mode, is_for_several ? tuning.num_sms_of_sums : tuning.num_sms);
    if (num_sms == 0 && config_.is_by_lane)
        throw std::invalid_argument("num_sms=0 cannot serve sums by lanes, whose rows leave one by one; give num_sms of 1 or more");
    const int64_t* counts = counts_for_copies(call.numbers, num_sms, false);
    GpuCombineParams params = call.params;
    params.direct = (params.direct && num_sms > 0) || config_.is_by_lane;  // copy engines take rows from the outbox
    const bool is_whole = num_sms > 0 && !mode.is_split;                   // otherwise the second half computes the sums that cross
    plan(call.plan, call.signature, call.rail, is_whole, as_stream(mode.stream));
    move_along(params, mode, num_sms, counts, call.slot_bytes());
}

// Move the rows of a call along a handle, whose plan is enqueued: in one launch, or half by half.
template <class Params>
void NvlinkExchange::move_along(const Params& params, const CallMode& mode, int num_sms, const int64_t* counts, int64_t slot_bytes) {
    const cudaStream_t stream = as_stream(mode.stream);
    if (num_sms > 0 && !mode.is_split) {
        launch(params, num_sms, true, stream);
        return join_rail(stream);
    }
    start(params, num_sms, stream);
    if (num_sms == 0) send_by_copies(counts, slot_bytes, stream);
    if (!mode.is_split) finish(params, stream);
}

void NvlinkExchange::move_experts(GpuExpertSlotsParams params, const Signature& signature, const CallMode& mode) {
    const Step step(*this, mode.stream);
    const cudaStream_t stream = as_stream(mode.stream);
    params.num_blocks = std::max(1, num_senders(mode, params.returns ? tuning::kReadersForSender * tuning.num_sms : tuning.num_sms));
    GpuPlanParams meeting{};
    meeting.cached = true;
    plan(meeting, signature, {}, false, stream);
    params.context = context();
    const int64_t row_bytes = params.unit * (params.returns ? static_cast<int64_t>(element_bytes(params.home_dtype)) : 1);
    const int64_t tail_bytes = params.returns ? params.unit * static_cast<int64_t>(element_bytes(params.slot_dtype)) : 0;
    params.ring = ring_of(params.returns ? tuning::kRingOfGradients : tuning.ring, row_bytes, tail_bytes);
    launch_expert_slots(params, stream);
}

template <class Call>
void NvlinkExchange::end(const Call& call, uintptr_t stream) {
    const Step step(*this, stream);
    finish(call.params, as_stream(stream));
}

template void NvlinkExchange::end(const GpuDispatchCall& call, uintptr_t stream);
template void NvlinkExchange::end(const GpuCombineCall& call, uintptr_t stream);

void NvlinkExchange::refuse(const std::string& reason, int cause, uintptr_t stream) {
    GpuPlanParams params{};
    params.cached = true;
    if (lack_.kind != kNoFailure && reason == Failures::reason_of(lack_, describe(lack_, rank_)))  // then the peers raise the same error
        params.stamp.why = lack_, is_told_ = true;
    else
        copy_text(params.stamp.reason, sizeof(params.stamp.reason), reason.empty() ? "unknown" : reason), params.stamp.why.seen = cause;
    const DeviceGuard guard(device_);
    last_.begins(stream);
    plan(params, {}, {}, false, as_stream(stream));
    last_.ends();
}

// ---- parameters of a call ----

int NvlinkExchange::num_senders(const CallMode& mode, int most_useful) const {
    const int most = num_multiprocessors_, num_sms = mode.num_sms < 0 ? std::min(most_useful, most) : mode.num_sms;
    const std::string all = std::to_string(most);
    if (num_sms > most)
        throw std::invalid_argument("num_sms is " + std::to_string(num_sms) + "; this GPU has " + all + ": give 1 to " + all +
                                    ", or 0 for copy engines");
    if (num_sms == 0 && is_capturing(as_stream(mode.stream)))
        throw std::invalid_argument(
            "num_sms=0 cannot be captured in a CUDA graph: the host waits for the peers before it has copy engines start; give num_sms of "
            "1 "
            "or more");
    return num_sms;
}

// Returns the [num_sources] rows that a cached call with these numbers sends to each source, if copy engines need them.
const int64_t* NvlinkExchange::counts_for_copies(const int64_t* numbers, int num_sms, bool is_dispatch) const {
    if (num_sms > 0) return nullptr;
    const int64_t* counts = numbers + 1 + (is_dispatch ? 0 : config_.num_sources());
    if (*std::min_element(counts, counts + config_.num_sources()) < 0)
        throw std::invalid_argument(
            "num_sms=0 needs counts on the host, and this handle's dispatch had num_recv_rows; give num_sms of 1 or more");
    return counts;
}

GpuContext NvlinkExchange::context() const {
    GpuContext c{memory_.waits(node_timeout_s(), &host_->failure, &state_->gave_up, &state_->ended),
                 config_,
                 layout_,
                 {},
                 &host_->counts,
                 expert_counts_,
                 state_,
                 num_plans_};
    for (int rank = 0; rank < config_.num_ranks; ++rank) c.workspaces[rank] = memory_.of(rank);
    return c;
}

void NvlinkExchange::complete(GpuRouting& routing) const {
    GpuRouting complete = scratch_routing_;
    static_cast<GpuTopkIdx&>(complete) = routing;
    const int node_tokens = config_.num_nodes == 1 ? routing.num_tokens : config_.node_tokens();
    const int segments = std::max(1, max_segments() / config_.num_nodes);
    complete.tokens_per_warp = tokens_per_warp(node_tokens, segments);
    complete.node_segments = node_segments(node_tokens, segments);
    complete.narrow_topk_idx = routing.narrow_topk_idx;
    routing = complete;
}

GpuRing NvlinkExchange::ring_of(const GpuRing& wished, int64_t row_bytes, int64_t tail_bytes) const {
    return fit_ring(tuning.uses_bulk_copies ? wished : GpuRing{}, row_bytes, tail_bytes, shared_bytes_ - kStaticSharedBytes);
}

template <class Params>
Params NvlinkExchange::completed(Params params, int64_t row_bytes, int64_t tail_bytes) const {
    complete(params.routing);
    params.context = context();
    params.ring = ring_of(tuning.ring, row_bytes, tail_bytes);
    if (rail_ != nullptr) rail_->complete(params);
    return params;
}

GpuCombineParams NvlinkExchange::completed(const GpuCombineParams& call) const {
    GpuCombineParams params = completed(call, row_bytes_of(call.dtype), call.tail_bytes());
    params.max_tile_pieces = max_tile_pieces();
    return params;
}

// ---- plan and counts ----

void NvlinkExchange::plan(GpuPlanParams params, const Signature& signature, const RailCall& rail, bool moves, cudaStream_t stream) {
    if (params.reports_counts && is_capturing(stream))
        throw std::invalid_argument(
            "a dispatch that waits for its counts cannot be captured in a CUDA graph; give num_recv_rows or a handle");
    if (streams_.is_sending() || (rail_ != nullptr && rail_->is_moving())) join(stream);  // the second half never came
    last_.follow(stream);
    complete(params.routing);
    ++num_plans_;
    params.context = context();
    if (allows_excess) params.num_recv_rows_bound = -1;
    const bool is_refusal = params.stamp.reason[0] != '\0' || params.stamp.why.kind != kNoFailure;
    if (!is_refusal) params.stamp.what = pack(signature);
    if (rail_ != nullptr) rail_->meet(params.context, params.stamp, rail, params.cached ? params.recv_counts : nullptr, stream);
    launch_plan(params, stream);
    if (rail_ != nullptr && moves) move_on_rail(rail.move.row_bytes);
    count_call(stream);
}

// Number the call. Captured calls are not made yet, and a capture may be dropped, so their numbers follow that of the last call made.
void NvlinkExchange::count_call(cudaStream_t stream) {
    const unsigned long long capture = capture_of(stream);
    num_captured_ = capture == 0 ? 0 : capture == capture_ ? num_captured_ + 1 : 1;
    capture_ = capture;
    if (capture == 0) ++num_calls_;
}

int64_t NvlinkExchange::wait_counts(int64_t* numbers) {
    wait_for_plan(host_->counts.ready, GpuPhase::kCounts);
    *numbers++ = num_calls_;
    numbers = std::copy_n(host_->counts.send_counts, config_.num_sources(), numbers);
    numbers = std::copy_n(host_->counts.recv_counts, config_.num_sources(), numbers);
    std::copy_n(expert_counts_, num_local_experts(), numbers);
    return host_->counts.num_rows;
}

// Wait until the plan of this call has written its number to `word`. Throw the failure if the plan reports one.
void NvlinkExchange::wait_for_plan(const volatile unsigned long long& word, GpuPhase phase) {
    using Clock = std::chrono::steady_clock;
    const double seconds = 2 * node_timeout_s() + kSecondsOfWork;  // longer than the kernel's own deadline
    const auto deadline = Clock::now() + std::chrono::duration<double>(seconds);
    for (int64_t round = 0; word != num_plans_; ++round) {
        relax_cpu();
        if (round % kRoundsToLook != kRoundsToLook - 1) continue;
        check();
        if (round % kRoundsToAsk == kRoundsToAsk - 1) ask();
        if (Clock::now() > deadline) {
            const auto expected = static_cast<int64_t>(num_plans_), seen = static_cast<int64_t>(word);
            throw TimeoutError("rank " + std::to_string(numbers_.of(rank_)) + ": this rank's own GPU did not come to its call within " +
                                   std::to_string(static_cast<int64_t>(seconds)) + " s; phase '" + name_of(phase) + "', expected " +
                                   std::to_string(expected) + ", seen " + std::to_string(seen),
                               numbers_.of(rank_), name_of(phase), expected, seen);
        }
    }
    std::atomic_thread_fence(std::memory_order_acquire);
    check();
}

// Let the caller interrupt a long wait, and check whether the GPU has failed in earlier work.
void NvlinkExchange::ask() const {
    if (poll_) poll_();
    is_ready(cudaStreamQuery(last_.running()));
}

// ---- launches ----

void NvlinkExchange::launch(const GpuDispatchParams& call, int num_sms, bool finishes, cudaStream_t stream) {
    GpuDispatchParams params = completed(call, call.row_bytes, call.scale_bytes);
    const int most = num_sms_of_call();
    params.to_outbox = num_sms == 0 && !finishes;
    if (params.to_outbox) num_sms = num_multiprocessors_;
    params.num_send_blocks = config_.num_ranks > 1 ? std::min(num_sms, std::max(1, most / 2)) : 0;
    params.num_receive_blocks = finishes ? std::clamp(most - params.num_send_blocks, 1, tuning.num_receive_blocks) : 0;
    params.num_lane_blocks =
        params.has_lanes && num_sms > 0 ? std::min(most, lane_blocks(params.routing.num_tokens * config_.num_topk)) : 0;
    launch_dispatch(params, stream, num_sms > 0 && finishes && follows_plan(stream));
}

void NvlinkExchange::launch(const GpuCombineParams& call, int num_sms, bool finishes, cudaStream_t stream) {
    GpuCombineParams params = completed(call);
    // Senders wait for work blocks, so some SMs are always left to these.
    const int most = num_sms_of_call(), most_senders = most - std::min(tuning::kFewestWorkers, most / 2);
    params.num_send_blocks = config_.num_ranks > 1 ? std::min(num_sms, std::max(1, most_senders)) : 0;
    params.finishes = finishes;
    params.reduces = !params.direct && config_.num_ranks > 1;
    const int rest = std::max(1, most - params.num_send_blocks);
    params.num_work_blocks = tuning.num_work_blocks > 0 ? std::min(tuning.num_work_blocks, rest) : rest;
    if (!params.reduces && !finishes) params.num_work_blocks = 0;
    if (params.num_send_blocks + params.num_work_blocks > 0) launch_combine(params, stream, finishes && follows_plan(stream));
}

// Start the first half of a call: send beside `stream`, or pack rows for copy engines.
template <class Params>
void NvlinkExchange::start(const Params& params, int num_sms, cudaStream_t stream) {
    if (num_sms == 0) return launch(params, 0, false, stream);
    streams_.fork(stream);
    launch(params, num_sms, false, streams_.sending);
    streams_.has_sent(streams_.sending);
}

// Send by copy engines counts[source] rows to each source. At any time each rank copies to a different peer. Each of two streams gets half
// of the rows, because one copy engine does not fill the link and pauses between copies. An enqueued copy cannot be cancelled, and a late
// peer may still read rows of the call before, so all peers must first have entered the call.
void NvlinkExchange::send_by_copies(const int64_t* counts, int64_t slot_bytes, cudaStream_t stream) {
    wait_for_plan(host_->counts.met, GpuPhase::kEntry);
    streams_.fork(stream);
    streams_.follow_fork(streams_.copying);
    const auto copy_part = [&](int peer, int64_t begin, int64_t end, cudaStream_t copies) {  // bytes [begin, end) of the peer's slots
        std::byte* const to = memory_.of(peer) + layout_.inbox_of(peer, rank_);
        const std::byte* const from = memory_.of(rank_) + layout_.outbox_of(rank_, peer);
        check_cuda(cudaMemcpyAsync(to + begin, from + begin, end - begin, cudaMemcpyDeviceToDevice, copies), "cudaMemcpyAsync");
        streams_.announce_after(copies);
    };
    for (int turn = 1; turn < config_.num_sources(); ++turn) {
        const int node = (config_.node + turn / config_.num_ranks) % config_.num_nodes, peer = (rank_ + turn) % config_.num_ranks;
        const int64_t count = counts[node * config_.num_ranks + peer], first = int64_t{node} * config_.node_tokens();
        if (peer == rank_ || count == 0) continue;
        const int64_t begin = first * slot_bytes, half = begin + count / 2 * slot_bytes, end = begin + count * slot_bytes;
        if (half > begin) copy_part(peer, begin, half, streams_.copying);
        copy_part(peer, half, end, streams_.sending);
        launch_announce({context(), peer, static_cast<int>(first), static_cast<int>(count)}, streams_.announcing);
    }
    streams_.announce_after(streams_.sending);
    streams_.has_sent(streams_.announcing);
}

// Start the second half of a call, on a stream that may differ from the first half's.
void NvlinkExchange::finish(const GpuDispatchParams& params, cudaStream_t stream) {
    if (!is_void()) {
        if (streams_.is_sending()) streams_.follow_fork(stream);  // the plan may be on another stream
        launch(params, 0, true, stream);
    }
    join(stream);
}

void NvlinkExchange::finish(const GpuCombineParams& call, cudaStream_t stream) {
    join(stream);  // first, because these blocks fill the GPU and wait for peers, which wait for this rank's rows
    if (is_void()) return;
    GpuCombineParams params = completed(call);
    params.finishes = true;
    params.num_work_blocks = num_sms_of_call();
    if (rail_ != nullptr) {
        rail_->fork(stream);
        move_on_rail(row_bytes_of(params.dtype));
    }
    launch_combine(params, stream, false);
    join_rail(stream);
}

// A row is summed in tiles.
void NvlinkExchange::move_on_rail(int64_t row_bytes) {
    rail_->move(context(), static_cast<int>(divide_up(row_bytes / 16, max_tile_pieces())), num_rail_sms());
}

// Returns the SMs for the exchange within the node: all except those of the rail's kernels, for which a combine's blocks wait.
int NvlinkExchange::num_sms_of_call() const {
    const int all = num_multiprocessors_ - num_rail_sms();
    return tuning.max_sms > 0 ? std::clamp(tuning.max_sms - num_rail_sms(), 2, all) : all;
}

int NvlinkExchange::num_rail_sms() const {
    return config_.num_nodes == 1 ? 0 : std::clamp(tuning.num_rail_sms, 1, num_multiprocessors_ - 1);
}

// Returns the upper bound of a plan's blocks. They wait for each other, so all must be on the GPU at once, beside the blocks of the rail.
int NvlinkExchange::max_segments() const {
    return std::min(plan_blocks_per_multiprocessor_ * (num_multiprocessors_ - num_rail_sms()), tuning::kMaxSegments);
}

void NvlinkExchange::join(cudaStream_t stream) {
    last_.go_on(stream);
    streams_.join(stream);
    join_rail(stream);
}

void NvlinkExchange::join_rail(cudaStream_t stream) {
    if (rail_ != nullptr) rail_->join(stream);
}

// Returns whether a kernel may start while the plan runs. In a graph it may not, because it waits for the plan's number, which is the same
// in each replay.
bool NvlinkExchange::follows_plan(cudaStream_t stream) const { return has_early_launch_ && !is_capturing(stream); }

}  // namespace deepep_moe

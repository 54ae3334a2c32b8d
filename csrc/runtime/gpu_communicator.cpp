#include "runtime/gpu_communicator.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <stdexcept>
#include <utility>

#include "common/wait.h"
#include "cuda/launch.h"

namespace deepep_moe {
namespace {

constexpr int kFewestWorkers = 8;           // blocks of a combine that do not send
constexpr int kPiecesForLink = 128;         // of a row that a warp sums at a time: small tasks end soon after the last rows came,
constexpr int kPiecesForMemory = 256;       // large ones read faster, which counts where half the rows stay on the GPU
constexpr int kMaxLaneBlocks = 48;          // with those that send and receive no more than there are multiprocessors
constexpr int64_t kRoundsToLook = 1 << 10;  // of a wait of the host, before it looks at failures and the clock
constexpr int64_t kRoundsToAsk = 1 << 20;   // before it asks the GPU and the caller: some tens of milliseconds
constexpr int kSecondsOfWork = 10;          // that the GPU may have before a call
constexpr int kRingBytes = 184 * 1024;      // of a block's rows on their way: the link is slower where more are

// That tell the peers about `num_lanes` lanes of top-k, which takes them microseconds.
int lane_blocks(int64_t num_lanes) { return static_cast<int>(std::clamp<int64_t>(divide_up(num_lanes, 512), 1, kMaxLaneBlocks)); }

}  // namespace

// ---- memory ----

GpuCommunicator::GpuCommunicator(const GpuWorkspaceConfig& config, int rank, int device, double timeout_s)
    : config_(config),
      layout_(config),
      rank_(rank),
      device_(device),
      owner_pid_(getpid()),
      timeout_s_(timeout_s),
      memory_(config.num_ranks, rank, device) {
    try {
        allocate();
    } catch (...) {
        release();
        throw;
    }
}

void GpuCommunicator::allocate() {
    const DeviceGuard guard(device_);
    num_multiprocessors_ = attribute(cudaDevAttrMultiProcessorCount, device_);
    shared_bytes_ = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device_);
    has_early_launch_ = tuning.uses_bulk_copies = attribute(cudaDevAttrComputeCapabilityMajor, device_) >= 9;
    if (config_.num_max_tokens >= static_cast<int64_t>(kRefused))
        throw std::invalid_argument("num_max_tokens_per_rank is " + std::to_string(config_.num_max_tokens) + "; this backend counts to " +
                                    std::to_string(kRefused - 1));
    const int64_t plan_bytes = plan_shared_bytes(config_);
    if (plan_bytes > shared_bytes_ - kStaticSharedBytes)
        throw std::runtime_error(std::to_string(config_.num_experts) + " experts need " + std::to_string(plan_bytes) +
                                 " bytes of shared memory for their counts, this GPU has " + std::to_string(shared_bytes_) + " a block");
    if (const int blocks = plan_blocks_per_multiprocessor(config_) * num_multiprocessors_; blocks < kMaxSegments)
        throw std::runtime_error("this GPU holds " + std::to_string(blocks) + " blocks of a plan with " +
                                 std::to_string(config_.num_experts) + " experts at once, and " + std::to_string(kMaxSegments) +
                                 " must be");
    memory_.allocate(layout_.total_bytes, layout_.inbox, layout_.left);
    void* host = nullptr;
    const size_t host_bytes = sizeof(HostSlots) + sizeof(int) * (config_.num_experts / config_.num_ranks);
    check_cuda(cudaHostAlloc(&host, host_bytes, cudaHostAllocMapped | cudaHostAllocPortable), "cudaHostAlloc");
    host_ = new (host) HostSlots{};
    expert_counts_ = reinterpret_cast<int*>(host_ + 1);
    allocate_scratch();
    int least = 0, greatest = 0;
    check_cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
    for (cudaStream_t* stream : {&sending_, &copying_, &announcing_})
        check_cuda(cudaStreamCreateWithPriority(stream, cudaStreamNonBlocking, greatest), "cudaStreamCreate");
    for (cudaEvent_t* event : {&forked_, &sent_, &copied_, &followed_})
        check_cuda(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "cudaEventCreate");
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

void GpuCommunicator::allocate_scratch() {
    const int64_t n = config_.num_max_tokens;
    GpuRouting& r = scratch_routing_;
    const auto words = [](auto** pointer, int64_t count) {
        return std::pair(reinterpret_cast<void**>(pointer), count * static_cast<int64_t>(sizeof(**pointer) / 4));
    };
    const std::pair<void**, int64_t> arrays[] = {words(&state_, 1),
                                                 words(&r.reduced, config_.num_ranks * layout_.num_reduced),
                                                 words(&r.segment_counts, kMaxSegments * layout_.columns),
                                                 words(&r.warp_counts, kMaxSegments * kPlanWarps * layout_.columns),
                                                 words(&r.index_in_warp, n * config_.num_topk),
                                                 words(&r.expert_row_base, config_.num_experts),
                                                 words(&r.send_slot, n * config_.num_ranks),
                                                 words(&r.send_token, n * config_.num_ranks),
                                                 words(&r.send_counts, config_.num_ranks)};
    int64_t total = 0;
    for (const auto& [pointer, count] : arrays) total += divide_up(count, 32) * 128;
    void* scratch = nullptr;
    check_cuda(cudaMalloc(&scratch, total), "cannot allocate the scratch");
    scratch_ = static_cast<std::byte*>(scratch);
    check_cuda(cudaMemset(scratch, 0, total), "cudaMemset");
    std::byte* next = scratch_;
    for (const auto& [pointer, count] : arrays) {
        *pointer = next;
        next += divide_up(count, 32) * 128;
    }
}

GpuCommunicator::~GpuCommunicator() {
    if (getpid() != owner_pid_) return;  // a forked child has no CUDA
    const DeviceGuard guard(device_, std::nothrow);
    cudaDeviceSynchronize();
    release();
}

void GpuCommunicator::release() {
    for (cudaEvent_t event : {forked_, sent_, copied_, followed_})
        if (event != nullptr) cudaEventDestroy(event);
    for (cudaStream_t stream : {sending_, copying_, announcing_})
        if (stream != nullptr) cudaStreamDestroy(stream);
    cudaFree(scratch_);
    cudaFreeHost(host_);
}

// ---- calls ----

GpuCommunicator::Step::Step(GpuCommunicator& owner) : owner_(owner) {
    if (owner.busy_.exchange(true)) throw std::logic_error(kTwoThreads);
}

GpuContext GpuCommunicator::context() const {
    GpuContext c{memory_.waits(timeout_s_, &host_->failure, &state_->gave_up, &state_->ended),
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

void GpuCommunicator::complete(GpuRouting& routing) const {
    GpuRouting complete = scratch_routing_;
    complete.topk_idx = routing.topk_idx;
    complete.token_stride = routing.token_stride;
    complete.lane_stride = routing.lane_stride;
    complete.is_int64 = routing.is_int64;
    complete.num_tokens = routing.num_tokens;
    complete.tokens_per_warp = tokens_per_warp(routing.num_tokens);
    complete.narrow_topk_idx = routing.narrow_topk_idx;
    routing = complete;
}

GpuDispatchParams GpuCommunicator::completed(GpuDispatchParams params) const {
    complete(params.routing);
    params.context = context();
    const GpuRing wished = tuning.uses_bulk_copies ? tuning.ring : GpuRing{};
    params.ring = fit_ring(wished, params.row_bytes, params.scale_bytes, kRingBytes, shared_bytes_ - kStaticSharedBytes);
    return params;
}

GpuCombineParams GpuCommunicator::completed(GpuCombineParams params) const {
    complete(params.routing);
    params.context = context();
    const GpuRing wished = tuning.uses_bulk_copies ? tuning.ring : GpuRing{};
    const int64_t row_bytes = config_.hidden * static_cast<int64_t>(element_bytes(params.dtype));
    params.ring = fit_ring(wished, row_bytes, params.tail_bytes(), kRingBytes, shared_bytes_ - kStaticSharedBytes);
    params.max_tile_pieces = config_.num_ranks > 2 ? kPiecesForLink : kPiecesForMemory;
    return params;
}

void GpuCommunicator::plan(GpuPlanParams params, const Signature& signature, uintptr_t stream) {
    const DeviceGuard guard(device_);
    if (params.reports_counts && is_capturing(as_stream(stream)))
        throw std::invalid_argument(
            "a dispatch that waits for its counts cannot be captured in a CUDA graph; give num_recv_rows or a handle");
    follow(as_stream(stream));
    complete(params.routing);
    ++num_plans_;
    params.context = context();
    if (params.stamp.reason[0] == '\0') params.stamp.what = pack(signature);
    launch_plan(params, as_stream(stream));
    count_call(as_stream(stream));
}

// Calls that are captured are not made yet, and a capture may be given up: their numbers follow that of the last call made before.
void GpuCommunicator::count_call(cudaStream_t stream) {
    const unsigned long long capture = capture_of(stream);
    num_captured_ = capture == 0 ? 0 : capture == capture_ ? num_captured_ + 1 : 1;
    capture_ = capture;
    if (capture == 0) ++num_calls_;
}

void GpuCommunicator::abandon() {
    const DeviceGuard guard(device_);
    join(last_.running());
}

GpuCounts GpuCommunicator::wait_counts(int64_t* numbers) {
    try {
        wait_for_plan(host_->counts.ready, GpuPhase::kCounts);
    } catch (...) {
        abandon();
        throw;
    }
    *numbers++ = num_calls_;
    numbers = std::copy_n(host_->counts.send_counts, config_.num_ranks, numbers);
    numbers = std::copy_n(host_->counts.recv_counts, config_.num_ranks, numbers);
    std::copy_n(expert_counts_, config_.num_experts / config_.num_ranks, numbers);
    return host_->counts;
}

// Until the plan of this call has written its number to `word`. Throws what it reports instead.
void GpuCommunicator::wait_for_plan(const volatile unsigned long long& word, GpuPhase phase) {
    using Clock = std::chrono::steady_clock;
    const double seconds = 2 * timeout_s_ + kSecondsOfWork;  // the kernel's own deadline comes first
    const auto deadline = Clock::now() + std::chrono::duration<double>(seconds);
    for (int64_t round = 0; word != num_plans_; ++round) {
        relax_cpu();
        if (round % kRoundsToLook != kRoundsToLook - 1) continue;
        check_this_call();
        if (round % kRoundsToAsk == kRoundsToAsk - 1) ask();
        if (Clock::now() > deadline) {
            check_cuda(cudaDeviceSynchronize(), "the GPU failed");
            const auto expected = static_cast<int64_t>(num_plans_), seen = static_cast<int64_t>(word);
            throw TimeoutError("rank " + std::to_string(rank_) + ": this rank's own GPU did not come to its call within " +
                                   std::to_string(static_cast<int64_t>(seconds)) + " s; phase '" + name_of(phase) + "', expected " +
                                   std::to_string(expected) + ", seen " + std::to_string(seen),
                               rank_, name_of(phase), expected, seen);
        }
    }
    std::atomic_thread_fence(std::memory_order_acquire);
    check_this_call();
}

// Of a wait that takes long: does somebody want it to end, has the GPU failed in whatever it was given before?
void GpuCommunicator::ask() const {
    const DeviceGuard guard(device_);
    if (poll_) poll_();
    const cudaError_t status = cudaStreamQuery(last_.running());
    if (status != cudaErrorNotReady) check_cuda(status, "the GPU failed");
}

void GpuCommunicator::dispatch(GpuDispatchParams params, int num_sms, uintptr_t stream) { dispatch(params, num_sms, true, true, stream); }

void GpuCommunicator::dispatch(GpuDispatchParams params, int num_sms, bool sends, bool receives, uintptr_t stream) {
    const DeviceGuard guard(device_);
    params = completed(params);
    params.num_send_blocks = config_.num_ranks > 1 ? num_sms : 0;
    params.num_receive_blocks = receives ? tuning.num_receive_blocks : 0;
    params.num_lane_blocks = params.has_lanes && sends ? lane_blocks(params.routing.num_tokens * config_.num_topk) : 0;
    launch_dispatch(params, as_stream(stream), sends && receives && follows_plan(as_stream(stream)));
}

void GpuCommunicator::combine(GpuCombineParams params, int num_sms, bool finishes, uintptr_t stream) {
    const DeviceGuard guard(device_);
    params = completed(params);
    // Senders wait for workers, so some multiprocessors are always left to those.
    params.num_send_blocks = config_.num_ranks > 1 ? std::min(num_sms, std::max(1, num_multiprocessors_ - kFewestWorkers)) : 0;
    params.finishes = finishes;
    params.reduces = !params.direct && config_.num_ranks > 1;
    const int rest = std::max(1, num_multiprocessors_ - params.num_send_blocks);
    params.num_work_blocks = tuning.num_work_blocks > 0 ? std::min(tuning.num_work_blocks, rest) : rest;
    if (!params.reduces && !finishes) params.num_work_blocks = 0;
    if (params.num_send_blocks + params.num_work_blocks > 0)
        launch_combine(params, as_stream(stream), finishes && follows_plan(as_stream(stream)));
}

void GpuCommunicator::start_dispatch(GpuDispatchParams params, int num_sms, uintptr_t stream) {
    if (num_sms == 0) {
        params.to_outbox = true;
        return dispatch(params, num_multiprocessors_, true, false, stream);
    }
    const DeviceGuard guard(device_);
    fork(as_stream(stream));
    dispatch(params, num_sms, true, false, reinterpret_cast<uintptr_t>(sending_));
    check_cuda(cudaEventRecord(sent_, sending_), "cudaEventRecord");
}

void GpuCommunicator::start_combine(GpuCombineParams params, int num_sms, uintptr_t stream) {
    if (num_sms == 0) return combine(params, 0, false, stream);
    const DeviceGuard guard(device_);
    fork(as_stream(stream));
    combine(params, num_sms, false, reinterpret_cast<uintptr_t>(sending_));
    check_cuda(cudaEventRecord(sent_, sending_), "cudaEventRecord");
}

// In the order in which every rank copies to another peer at a time, half of it on each of two streams: one copy engine does not fill the
// link, and pauses between two copies. A copy that is enqueued cannot be called off, so first all peers must have entered the call: one
// that comes too late may still read the rows of the call before.
void GpuCommunicator::copy(const std::vector<int>& counts, int64_t slot_bytes, uintptr_t stream) {
    const DeviceGuard guard(device_);
    wait_for_plan(host_->counts.met, GpuPhase::kEntry);
    fork(as_stream(stream));
    check_cuda(cudaStreamWaitEvent(copying_, forked_, 0), "cudaStreamWaitEvent");
    const auto announce_after = [&](cudaStream_t copies) {
        check_cuda(cudaEventRecord(copied_, copies), "cudaEventRecord");
        check_cuda(cudaStreamWaitEvent(announcing_, copied_, 0), "cudaStreamWaitEvent");
    };
    const auto copy_part = [&](int peer, int64_t begin, int64_t end, cudaStream_t copies) {
        check_cuda(cudaMemcpyAsync(inbox_of(peer) + begin, outbox_for(peer) + begin, end - begin, cudaMemcpyDeviceToDevice, copies),
                   "cudaMemcpyAsync");
        announce_after(copies);
    };
    for (int offset = 1; offset < config_.num_ranks; ++offset) {
        const int peer = (rank_ + offset) % config_.num_ranks;
        const int64_t bytes = counts.at(peer) * slot_bytes, half = counts.at(peer) / 2 * slot_bytes;
        if (bytes == 0) continue;
        if (half > 0) copy_part(peer, 0, half, copying_);
        copy_part(peer, half, bytes, sending_);
        launch_announce({context(), peer, counts[peer]}, announcing_);
    }
    announce_after(sending_);
    check_cuda(cudaEventRecord(sent_, announcing_), "cudaEventRecord");
}

void GpuCommunicator::copy_block(int peer, int64_t bytes, uintptr_t stream) {
    if (peer == rank_ || bytes > layout_.box_bytes)
        throw std::invalid_argument("a block to rank " + std::to_string(peer) + " of " + std::to_string(bytes) +
                                    " bytes; the workspace has room for " + std::to_string(layout_.box_bytes) + " to another rank");
    const DeviceGuard guard(device_);
    check_cuda(cudaMemcpyAsync(inbox_of(peer), outbox_for(peer), bytes, cudaMemcpyDeviceToDevice, as_stream(stream)), "cudaMemcpyAsync");
}

// This rank's slots in the memory of `peer`, and those for `peer` in its own.
std::byte* GpuCommunicator::inbox_of(int peer) const { return memory_.of(peer) + layout_.inbox_of(peer, rank_); }
std::byte* GpuCommunicator::outbox_for(int peer) const { return memory_.of(rank_) + layout_.outbox_of(rank_, peer); }

void GpuCommunicator::end_dispatch(GpuDispatchParams params, uintptr_t stream) {
    const DeviceGuard guard(device_);
    if (void_plan_ == num_plans_) return join(as_stream(stream));
    if (is_sending_) check_cuda(cudaStreamWaitEvent(as_stream(stream), forked_, 0), "cudaStreamWaitEvent");  // the plan may be on another
    dispatch(params, 0, false, true, stream);
    join(as_stream(stream));
}

void GpuCommunicator::end_combine(GpuCombineParams params, uintptr_t stream) {
    const DeviceGuard guard(device_);
    if (void_plan_ == num_plans_) return join(as_stream(stream));
    params = completed(params);
    params.finishes = true;
    params.num_work_blocks = num_multiprocessors_;
    join(as_stream(stream));  // first: these blocks fill the GPU and wait for peers, which wait for what this rank sends
    launch_combine(params, as_stream(stream), false);
}

void GpuCommunicator::refuse(const std::string& reason, uintptr_t stream) {
    GpuPlanParams params{};
    params.cached = true;
    copy_text(params.stamp.reason, sizeof(params.stamp.reason), reason.empty() ? "unknown" : reason);
    const DeviceGuard guard(device_);
    check_cuda(cudaDeviceSynchronize(), "the GPU failed");
    const GpuFailure earlier = host_->failure;
    plan(params, {}, stream);
    check_cuda(cudaDeviceSynchronize(), "the GPU failed");
    host_->failure = earlier;  // this rank's caller gets the error it was refused with, and later what an earlier call had
    start_afresh();
}

// After a failure, with nothing running.
void GpuCommunicator::start_afresh() {
    check_cuda(cudaMemset(&state_->gave_up, 0, sizeof(GpuState) - offsetof(GpuState, gave_up)), "cudaMemset");
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

// ---- streams ----

void GpuCommunicator::follow(cudaStream_t stream) {
    if (is_sending_) join(stream);  // the first half of a call that never had its second
    last_.follow(stream, followed_);
}

// May a kernel start while the plan runs? A graph keeps the plan's number, by which the kernel would know when: there it may not.
bool GpuCommunicator::follows_plan(cudaStream_t stream) const { return has_early_launch_ && !is_capturing(stream); }

void GpuCommunicator::fork(cudaStream_t stream) {
    check_cuda(cudaEventRecord(forked_, stream), "cudaEventRecord");
    check_cuda(cudaStreamWaitEvent(sending_, forked_, 0), "cudaStreamWaitEvent");
    is_sending_ = true;
    sends_in_ = capture_of(stream);
}

void GpuCommunicator::join(cudaStream_t stream) {
    const bool waits = std::exchange(is_sending_, false);
    last_.go_on(stream);
    if (waits && capture_of(stream) == sends_in_) check_cuda(cudaStreamWaitEvent(stream, sent_, 0), "cudaStreamWaitEvent");
}

// ---- failures ----

void GpuCommunicator::check() {
    if (!has_failed()) return;
    const DeviceGuard guard(device_);
    check_cuda(cudaDeviceSynchronize(), "the GPU failed");
    const GpuFailure failure = in_calls(host_->failure);
    host_->failure = {};
    if (failure.kind != kBoundExceeded) void_plan_ = num_plans_;
    start_afresh();
    raise(failure);
}

// Of a call without a bound: that an earlier one exceeded its own is for the next call to raise.
void GpuCommunicator::check_this_call() {
    if (static_cast<volatile GpuFailure&>(host_->failure).kind != kBoundExceeded) check();
}

// What was expected and seen, as numbers of calls where the words say those.
GpuFailure GpuCommunicator::in_calls(GpuFailure f) const {
    const auto phase = static_cast<GpuPhase>(f.phase);
    if (!ends_wait(f.kind) || (phase != GpuPhase::kEntry && phase != GpuPhase::kCounts)) return f;
    f.expected >>= kValueBits;
    f.seen = phase == GpuPhase::kEntry ? last_call_of(f.peer) : f.seen >> kValueBits;
    return f;
}

std::string GpuCommunicator::describe(const GpuFailure& f, int rank) const {
    const std::string token = "topk_idx[" + std::to_string(f.expected), me = "rank " + std::to_string(rank),
                      peer = "rank " + std::to_string(f.peer);
    const std::string expected = std::to_string(f.expected), seen = std::to_string(f.seen);
    const auto call = [](uint64_t packed) { return deepep_moe::describe(unpack(packed)); };
    switch (f.kind) {
        case kIndexOutOfRange:
            return token + ", " + std::to_string(f.peer) + "] is " + seen + "; it must be -1 (no expert) or 0 to " +
                   std::to_string(config_.num_experts - 1);
        case kDuplicateExpert: return token + "] names expert " + seen + " twice; a token may choose an expert once";
        case kBoundExceeded:
            return me + " would receive " + seen + " rows, more than its num_recv_rows of " + expected + "; give a larger bound or none";
        case kMismatch:
            return "ranks make different calls: " + me + ": " + call(stamp_of(rank_, f.expected).what) + "; " + peer + ": " +
                   call(stamp_of(f.peer, f.expected).what);
        case kPeerRefused: return peer + " did not make its call";
        case kFailedHandle: return me + ": " + kHandleFailed;
        default: return ends_wait(f.kind) ? memory_.describe_lack(f, rank, timeout_s_) : "unknown";
    }
}

void GpuCommunicator::raise(const GpuFailure& f) const {
    const std::string message = describe(f, rank_);
    switch (f.kind) {
        case kIndexOutOfRange:
        case kDuplicateExpert:
        case kFailedHandle: throw std::invalid_argument(message);
        case kBoundExceeded: throw CapacityError(message, rank_);
        case kMismatch: throw MismatchError(message);
        case kPeerRefused: throw PeerError(message + ": " + reason_of(f.peer, static_cast<int>(f.expected)), f.peer);
        default: memory_.raise_lack(f, timeout_s_);
    }
}

// What `peer` has said of its refusal.
std::string GpuCommunicator::reason_of(int peer, int parity) const {
    const GpuStamp stamp = stamp_of(peer, parity);
    return stamp.reason[0] != '\0' ? stamp.reason : describe(in_calls(stamp.why), peer);
}

// The last call that `peer` has entered, as far as this rank knows.
long long GpuCommunicator::last_call_of(int peer) const {
    unsigned long long entered[2];
    for (int parity = 0; parity < 2; ++parity)
        check_cuda(cudaMemcpy(&entered[parity], memory_.of(rank_) + layout_.entered_of(parity, peer), sizeof(entered[parity]),
                              cudaMemcpyDeviceToHost),
                   "cudaMemcpy");
    return static_cast<long long>(std::max(entered[0], entered[1]) >> kValueBits);
}

GpuStamp GpuCommunicator::stamp_of(int peer, int parity) const {
    GpuStamp stamp{};
    const std::byte* from = memory_.of(rank_) + layout_.stamp_of(parity, peer);
    check_cuda(cudaMemcpy(&stamp, from, sizeof(stamp), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return stamp;
}

}  // namespace deepep_moe

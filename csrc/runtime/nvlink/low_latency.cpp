#include "runtime/nvlink/low_latency.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <stdexcept>

#include "cuda/workspace.h"
#include "common/signature.h"

namespace deepep_moe {
namespace {

// Returns an odd multiple of 2^64 / (golden ratio). Two of them never differ by a call's number, and memory does not hold one by chance.
unsigned long long new_mark() {
    static std::atomic<unsigned long long> num_made = 0;
    return (2 * num_made++ + 1) * 0x9e3779b97f4a7c15;
}

}  // namespace

// ---- memory ----

NvlinkLowLatency::NvlinkLowLatency(const LowLatencyConfig& config, int rank, int device, double timeout_s, bool masks_stalled,
                                   int ranks_per_node)
    : config_(config),
      layout_(config, config.num_ranks / ranks_per_node),
      rank_(rank),
      ranks_per_node_(ranks_per_node),
      first_rank_(rank / ranks_per_node * ranks_per_node),
      device_(device),
      owner_pid_(getpid()),
      timeout_s_(timeout_s),
      masks_stalled_(masks_stalled),
      failed_mark_(new_mark()),
      memory_(ranks_per_node, rank, device, first_rank_),
      failures_(memory_, {config.num_ranks, 0, rank}, config.num_experts, timeout_s, timeout_s) {
    const DeviceGuard guard(device_);
    const int64_t shared = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device_) - kStaticSharedBytes,
                  needed = std::max(low_latency_shared_bytes(config_), low_latency_combine_shared_bytes());
    const int blocks = needed > shared ? 0 : low_latency_blocks_per_multiprocessor(config_);
    if (blocks == 0)
        throw std::runtime_error("low-latency calls with " + std::to_string(config_.num_experts) + " experts and " +
                                 std::to_string(config_.num_max_tokens) + " tokens need " + std::to_string(needed) +
                                 " bytes of shared memory a block, this GPU has " + std::to_string(shared));
    num_blocks = std::min(blocks * attribute(cudaDevAttrMultiProcessorCount, device_), kLowLatencyMaxBlocks);
    memory_.allocate(layout_.total_bytes, layout_.total_bytes, layout_.left);
    const Array counters = array_of(&state_, 1);
    allocate_arrays(counters_, {&counters, 1}, "cannot allocate the counters");
    host_ = new_pinned<HostSlots>();
    failures_.create();
    last_.create();
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

// The flags by which all ranks have sent their calls are gone, so nobody may wait for a rank in a call before the next one.
void NvlinkLowLatency::resume() {
    const DeviceGuard guard(device_);
    memory_.allocate(layout_.total_bytes, layout_.total_bytes, layout_.left);
    unsigned long long next = 0, first_calls[kLowLatencyMaxRanks];
    failures_.read(&next, state_->num_sent, sizeof(next));
    std::fill(first_calls, std::end(first_calls), next + 1);
    check_cuda(cudaMemcpy(state_->first_calls, first_calls, sizeof(first_calls), cudaMemcpyHostToDevice), "cudaMemcpy");
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

NvlinkLowLatency::~NvlinkLowLatency() {
    if (getpid() != owner_pid_) return;  // a forked child has no CUDA
    const DeviceGuard guard(device_, std::nothrow);
    cudaDeviceSynchronize();
    rail_.reset();
}

std::string NvlinkLowLatency::handle() const {
    char bus[32] = {};
    check_cuda(cudaDeviceGetPCIBusId(bus, sizeof(bus), device_), "cudaDeviceGetPCIBusId");
    return memory_.handle() + bus;
}

void NvlinkLowLatency::connect(const std::vector<std::string>& handles, const std::vector<int>& descriptors) {
    for (int i = 0; i < ranks_per_node_; ++i) check_link(first_rank_ + i, handles[i].substr(GpuMemory::kHandleBytes));
    memory_.connect(handles, descriptors);
}

void NvlinkLowLatency::attach_rail(const RailShim& shim, const std::vector<uintptr_t>& bases, const std::vector<int>& pes) {
    rail_ = std::make_unique<LowLatencyRail>(config_, shim, bases, pes, rank_);
}

int64_t NvlinkLowLatency::handle_bytes() const {
    if (num_nodes() > 1) return LowLatencyRailHandle(config_, num_nodes()).total_bytes;
    return LowLatencyHandleLayout(config_).total_bytes;
}

void NvlinkLowLatency::check_link(int rank, const std::string& bus) const {
    int peer = 0, atomics = 1;  // NVLink has atomics, PCIe does not
    if (cudaDeviceGetByPCIBusId(&peer, bus.c_str()) != cudaSuccess)
        cudaGetLastError();  // this process does not see that GPU, so it learns nothing of the link
    else if (peer != device_)
        check_cuda(cudaDeviceGetP2PAttribute(&atomics, cudaDevP2PAttrNativeAtomicSupported, device_, peer), "cudaDeviceGetP2PAttribute");
    if (atomics == 0)
        throw std::runtime_error(
            "the GPU of rank " + std::to_string(rank) + ", " + bus +
            ", is reached without NVLink (its link has no atomics), and only of NVLink it is known that lines of 128 bytes arrive whole");
}

// ---- calls ----

LowLatencyContext NvlinkLowLatency::context() const {
    LowLatencyContext c{memory_.waits(timeout_s_, &host_->failure, &state_->gave_up, &state_->ended),
                        config_,
                        static_cast<unsigned>(first_rank_),
                        static_cast<unsigned>(ranks_per_node_),
                        0,
                        layout_,
                        state_,
                        &host_->masks,
                        masks_stalled_,
                        failed_mark_,
                        {}};
    for (int rank = 0; rank < config_.num_ranks; rank += ranks_per_node_) c.rail |= 1u << rank;
    for (int rank = first_rank_; rank < first_rank_ + ranks_per_node_; ++rank) c.workspaces[rank] = memory_.of(rank);
    return c;
}

// Begin a call, or its receiving half.
void NvlinkLowLatency::begin(bool sends, uintptr_t address) {
    const cudaStream_t stream = as_stream(address);
    last_.begins(address);
    last_.follow(stream);
    if (!sends || num_to_catch_up_ == 0) return;
    if (!is_capturing(stream)) --num_to_catch_up_;
    LowLatencyControlParams params{};
    params.action = LowLatencyControlParams::kCatchUp;
    params.context = context();
    if (rail_) rail_->relay(params.context, nullptr, num_blocks, stream), rail_->control(params, stream);
    launch_low_latency_control(params, stream);
}

void NvlinkLowLatency::end(bool sends) {
    last_.ends();
    num_calls_ += sends;
}

template <class Params>
void NvlinkLowLatency::make(const Params& params, bool sends, bool receives, uintptr_t stream) {
    const DeviceGuard guard(device_);
    const std::lock_guard lock(enqueuing_);
    begin(sends, stream);
    if (!rail_) launch_low_latency(LowLatencyLaunch<Params>{context(), params, sends, receives, num_blocks}, as_stream(stream));
    if (rail_ && sends) rail_->send(context(), params, num_blocks, as_stream(stream));
    if (rail_ && receives) rail_->receive(context(), params, num_blocks, as_stream(stream));
    end(sends);
}

template void NvlinkLowLatency::make(const LowLatencyDispatchParams&, bool, bool, uintptr_t);
template void NvlinkLowLatency::make(const LowLatencyCombineParams&, bool, bool, uintptr_t);

// ---- between calls ----

void NvlinkLowLatency::control(LowLatencyControlParams& params, uintptr_t stream) {
    const DeviceGuard guard(device_);
    const std::lock_guard lock(enqueuing_);
    using Params = LowLatencyControlParams;
    const bool refuses = params.action == Params::kRefuse;
    begin(refuses, stream);
    params.context = context();
    if (rail_ && params.action == Params::kUnmask) rail_->relay(params.context, nullptr, num_blocks, as_stream(stream));  // it may wait
    if (rail_) rail_->control(params, as_stream(stream));
    launch_low_latency_control(params, as_stream(stream));
    if (rail_ && refuses) rail_->relay(params.context, nullptr, num_blocks, as_stream(stream));  // last: it may wait, a refusal must not
    if (rail_ && params.action == Params::kUnmask) {
        params.action = Params::kTellReturned;
        rail_->control(params, as_stream(stream));
    }
    end(refuses);
    if (refuses) num_to_catch_up_ = kMaxInFlight;
}

void NvlinkLowLatency::refuse(const std::string& reason, uintptr_t stream) {
    LowLatencyControlParams params{};
    params.action = LowLatencyControlParams::kRefuse;
    copy_text(params.reason, sizeof(LowLatencyReason::text), reason.empty() ? "unknown" : reason);
    control(params, stream);
}

void NvlinkLowLatency::mask(int rank, bool masked, uintptr_t stream) {
    LowLatencyControlParams params{};
    params.action = masked ? LowLatencyControlParams::kMask : LowLatencyControlParams::kUnmask;
    params.rank = rank;
    const auto settle = [&] {
        check_cuda(cudaStreamSynchronize(as_stream(stream)), "the GPU failed");
        if (rail_ && !masked) check();
    };
    settle();  // an earlier failure must not be taken for one of this action
    control(params, stream);
    settle();
}

void NvlinkLowLatency::rejoin(uintptr_t stream) {
    forget_failure();           // calls that this rank has made alone do not count
    failed_mark_ = new_mark();  // their numbers will be used again
    LowLatencyControlParams params{};
    params.action = LowLatencyControlParams::kRejoin;
    control(params, stream);
    check_cuda(cudaStreamSynchronize(as_stream(stream)), "the GPU failed");
    check();
}

unsigned NvlinkLowLatency::masks() const { return static_cast<volatile unsigned&>(host_->masks); }

// ---- failures ----

bool NvlinkLowLatency::has_failed() const { return deepep_moe::has_failed(host_->failure); }

void NvlinkLowLatency::check() {
    if (!has_failed()) return;
    const GpuFailure failure = forget_failure();
    num_to_catch_up_ = kMaxInFlight;
    raise(failure);
}

// Clear the failure and return it, once the GPU has finished its work.
GpuFailure NvlinkLowLatency::forget_failure() {
    const DeviceGuard guard(device_);
    return failures_.take(host_->failure, &state_->gave_up, sizeof(state_->gave_up), [&] { return last_.is_done(); });
}

std::string NvlinkLowLatency::describe_mismatch(const GpuFailure& f, int reporter) const {
    const auto phase = static_cast<GpuPhase>(f.phase);
    const std::string me = "rank " + std::to_string(reporter), peer = "rank " + std::to_string(f.peer);
    if (phase == GpuPhase::kRejoin)
        return "ranks take " + me + " back between different calls: before call " + std::to_string(f.expected) + ", " + peer +
               " before call " + std::to_string(f.seen);
    const bool is_combine = phase == GpuPhase::kCombineRows;
    const std::string ours = is_combine ? describe_combine(f.expected) : deepep_moe::describe(LowLatencyWhat::unpacked(f.expected));
    const std::string theirs = is_combine ? describe_combine(LowLatencyWhat::dispatch_near(f.expected, static_cast<int>(f.seen)))
                                          : deepep_moe::describe(LowLatencyWhat::unpacked(f.seen));
    return "ranks make different calls: " + me + ": " + ours + "; " + peer + ": " + theirs;
}

// If a peer's failure is a third rank's refusal, the text lacks the reason, because that lies in the peer's memory.
std::string NvlinkLowLatency::describe(const GpuFailure& f, int reporter) const {
    const std::string me = "rank " + std::to_string(reporter), peer = "rank " + std::to_string(f.peer);
    switch (f.kind) {
        case kPeerRefused:
            return reporter == rank_ ? failures_.peer_refused(f.peer, reason_of(f.peer, f.expected)) : peer + " did not make its call";
        case kOvertaken:
            return peer + " is in call " + std::to_string(f.seen) + " already, " + me + " in call " + std::to_string(f.expected) + ": " +
                   peer + " gave up waiting for a rank, and calls of its that were enqueued went on";
        case kMismatch: return describe_mismatch(f, reporter);
        default: return failures_.describe(f, reporter);
    }
}

void NvlinkLowLatency::raise(const GpuFailure& f) const {
    switch (f.kind) {
        case kPeerRefused: throw PeerError(describe(f, rank_), f.peer);
        case kOvertaken:
        case kMismatch: throw MismatchError(describe(f, rank_));
        default: failures_.raise(f);
    }
}

std::string NvlinkLowLatency::reason_of(int peer, long long call) const {
    LowLatencyReason reason{};
    failures_.read(&reason, memory_.of(rank_) + layout_.reason_of(peer, call), sizeof(reason));
    return reason.text[0] != '\0' ? reason.text : Failures::reason_of(reason.why, describe(reason.why, peer));
}

}  // namespace deepep_moe

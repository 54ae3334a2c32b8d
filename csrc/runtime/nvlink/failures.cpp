#include "runtime/nvlink/failures.h"

#include <chrono>
#include <stdexcept>
#include <thread>

#include "common/errors.h"

namespace deepep_moe {
namespace {

constexpr auto kPatience = std::chrono::seconds(5);  // for other work on the stream of a failed call

std::string name_of_rank(int rank) { return "rank " + std::to_string(rank); }

}  // namespace

void Failures::create() {
    cudaStream_t stream = nullptr;
    check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    stream_ = stream;
}

GpuFailure Failures::take(GpuFailure& slot, void* words, size_t num_bytes, const std::function<bool()>& is_done) const {
    const GpuFailure failure = slot;
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    while (!is_done()) {
        if (std::chrono::steady_clock::now() > deadline) return failure;
        std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    forget(slot, words, num_bytes);
    return failure;
}

void Failures::forget(GpuFailure& slot, void* words, size_t num_bytes) const {
    check_cuda(cudaMemsetAsync(words, 0, num_bytes, stream_), "cudaMemsetAsync");
    check_cuda(cudaStreamSynchronize(stream_), "the GPU failed");
    slot = {};
}

void Failures::read(void* to, const void* from, size_t num_bytes) const {
    check_cuda(cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyDeviceToHost, stream_), "cudaMemcpyAsync");
    check_cuda(cudaStreamSynchronize(stream_), "the GPU failed");
}

std::string Failures::describe(const GpuFailure& f, int reporter) const {
    const std::string token = "topk_idx[" + std::to_string(f.expected), seen = std::to_string(f.seen);
    switch (f.kind) {
        case kIndexOutOfRange:
            return token + ", " + std::to_string(f.peer) + "] is " + seen + "; it must be -1 (no expert) or 0 to " +
                   std::to_string(num_experts_ - 1);
        case kDuplicateExpert: return token + "] names expert " + seen + " twice; a token may choose an expert once";
        case kFailedHandle: return kHandleFailed;
        case kBadCopy:
            return "copies[" + std::to_string(f.peer) + ", " + std::to_string(f.expected) + "] is " + seen +
                   "; it must be -1 or an expert of another rank, once for each rank";
        default: return ends_wait(f.kind) ? describe_lack(f, reporter) : "unknown";
    }
}

std::string Failures::describe_lack(const GpuFailure& f, int reporter) const {
    const std::string me = name_of_rank(numbers_.of(reporter)), peer = name_of_rank(numbers_.of(reporter, f.peer));
    const std::string phase = name_of(static_cast<GpuPhase>(f.phase));
    if (f.kind == kPeerLeft) return me + ", waiting for " + phase + ": " + peer + kHasLeft;
    const std::string why =
        f.kind == kPeerEnded ? ", its process " + (memory_.has(f.peer) ? std::to_string(memory_.process_of(f.peer)) + " " : "") + "is gone"
                             : " within the deadline of " + std::to_string(static_cast<int64_t>(deadline_of(f, reporter) * 1000)) + " ms";
    return me + ": " + peer + " did not deliver" + why + "; phase '" + phase + "', expected " + std::to_string(f.expected) + ", seen " +
           std::to_string(f.seen) + (f.kind == kPeerEnded ? "" : kIfSlow);
}

// Returns the deadline that the kernels used; wait_word doubles it for waits for the rank itself.
double Failures::deadline_of(const GpuFailure& f, int reporter) const {
    if (is_rail_peer(f.peer)) return rail_timeout_s_;
    return timeout_s_ * (numbers_.of(reporter, f.peer) == numbers_.of(reporter) ? 2 : 1);
}

std::string Failures::reason_of(const GpuFailure& f, const std::string& description) {
    const char* name = ends_wait(f.kind) ? "EPTimeoutError" : "ValueError";
    if (f.kind == kPeerLeft || f.kind == kPeerRefused) name = "EPPeerError";
    if (f.kind == kExceededBound) name = "EPCapacityError";
    if (f.kind == kMismatch || f.kind == kOvertaken) name = "EPMismatchError";
    return f.kind == kNoFailure ? description : name + (": " + description);
}

void Failures::raise(const GpuFailure& f) const {
    const std::string message = describe(f, numbers_.index);
    const int peer = numbers_.of(f.peer);
    switch (f.kind) {
        case kIndexOutOfRange: throw NoExpertError(message);
        case kDuplicateExpert:
        case kBadCopy:
        case kFailedHandle: throw std::invalid_argument(message);
        case kPeerLeft: throw PeerError(message, peer);
        default: throw TimeoutError(message, peer, name_of(static_cast<GpuPhase>(f.phase)), f.expected, f.seen);
    }
}

std::string Failures::peer_refused(int peer, const std::string& reason) const {
    return name_of_rank(numbers_.of(peer)) + " did not make its call: " + reason;
}

}  // namespace deepep_moe

#include "runtime/gpu_communicator.h"

#include <cuda_runtime_api.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <stdexcept>

#include "common/wait.h"
#include "cuda/launch.h"

namespace deepep_moe {
namespace {

void check_cuda(cudaError_t status, const char* what) {
    if (status != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

const char* name_of(GpuPhase phase) {
    switch (phase) {
        case GpuPhase::kEntry: return "entry into the call";
        case GpuPhase::kCounts: return "counts";
        case GpuPhase::kDispatchRows: return "dispatch rows";
        case GpuPhase::kCombineRows: return "combine rows";
        default: return "";
    }
}

// The calling thread's device, put back at the end of a scope.
class DeviceGuard {
public:
    explicit DeviceGuard(int device) {
        check_cuda(cudaGetDevice(&before_), "cudaGetDevice");
        check_cuda(cudaSetDevice(device), "cudaSetDevice");
    }
    ~DeviceGuard() { cudaSetDevice(before_); }

private:
    int before_ = 0;
};

}  // namespace

GpuCommunicator::GpuCommunicator(const GpuWorkspaceConfig& config, int rank, int device, double timeout_s)
    : config_(config), layout_(config), rank_(rank), device_(device), owner_pid_(getpid()), timeout_s_(timeout_s) {
    const DeviceGuard guard(device);
    void* workspace = nullptr;
    check_cuda(cudaMalloc(&workspace, layout_.total_bytes), "cannot allocate the workspace");
    workspaces_[rank] = static_cast<std::byte*>(workspace);
    check_cuda(cudaMemset(workspace, 0, layout_.staging), "cudaMemset");
    void* host = nullptr;
    check_cuda(cudaHostAlloc(&host, sizeof(HostSlots), cudaHostAllocMapped | cudaHostAllocPortable), "cudaHostAlloc");
    host_ = new (host) HostSlots{};
    allocate_scratch();
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

void GpuCommunicator::allocate_scratch() {
    const int64_t n = config_.num_max_tokens, segments = divide_up(n, kTokensPerSegment);
    GpuRouting& r = scratch_routing_;
    const std::pair<int32_t**, int64_t> arrays[] = {{&r.segment_counts, segments * layout_.columns},
                                                    {&r.index_in_segment, n * config_.num_topk},
                                                    {&r.expert_row_base, config_.num_experts},
                                                    {&r.send_slot, n * config_.num_ranks},
                                                    {&r.send_token, n * config_.num_ranks},
                                                    {&r.send_row_idx, n * config_.num_topk},
                                                    {&r.send_counts, config_.num_ranks},
                                                    {&gave_up_, 1}};
    int64_t total = 0;
    for (const auto& [pointer, count] : arrays) total += divide_up(count, 32) * 32;
    void* scratch = nullptr;
    check_cuda(cudaMalloc(&scratch, total * sizeof(int32_t) + 128), "cannot allocate the scratch");
    check_cuda(cudaMemset(scratch, 0, total * sizeof(int32_t)), "cudaMemset");
    scratch_ = static_cast<std::byte*>(scratch);
    auto* next = static_cast<int32_t*>(scratch);
    for (const auto& [pointer, count] : arrays) {
        *pointer = next;
        next += divide_up(count, 32) * 32;
    }
}

GpuCommunicator::~GpuCommunicator() {
    if (getpid() != owner_pid_) return;  // a forked child has no CUDA
    const DeviceGuard guard(device_);
    cudaDeviceSynchronize();
    for (int rank = 0; rank < config_.num_ranks; ++rank)
        if (rank != rank_ && workspaces_[rank] != nullptr) cudaIpcCloseMemHandle(workspaces_[rank]);
    cudaFree(workspaces_[rank_]);
    cudaFree(scratch_);
    cudaFreeHost(host_);
}

std::string GpuCommunicator::handle() const {
    const DeviceGuard guard(device_);
    cudaIpcMemHandle_t handle;
    check_cuda(cudaIpcGetMemHandle(&handle, workspaces_[rank_]), "cannot share the workspace (cudaIpcGetMemHandle)");
    return {reinterpret_cast<const char*>(&handle), sizeof(handle)};
}

void GpuCommunicator::connect(const std::vector<std::string>& handles) {
    const DeviceGuard guard(device_);
    for (int rank = 0; rank < config_.num_ranks; ++rank) {
        if (rank == rank_) continue;
        cudaIpcMemHandle_t handle;
        std::memcpy(&handle, handles[rank].data(), sizeof(handle));
        void* workspace = nullptr;
        check_cuda(cudaIpcOpenMemHandle(&workspace, handle, cudaIpcMemLazyEnablePeerAccess),
                   ("cannot reach the GPU of rank " + std::to_string(rank) + " (cudaIpcOpenMemHandle)").c_str());
        workspaces_[rank] = static_cast<std::byte*>(workspace);
    }
}

GpuContext GpuCommunicator::context() const {
    GpuContext c{rank_, config_, sequence_, static_cast<unsigned long long>(timeout_s_ * 1e9), {}, &host_->failure, &host_->counts, gave_up_};
    for (int rank = 0; rank < config_.num_ranks; ++rank) c.workspaces[rank] = workspaces_[rank];
    return c;
}

void GpuCommunicator::complete(GpuRouting& routing) const {
    GpuRouting complete = scratch_routing_;
    complete.topk_idx = routing.topk_idx;
    complete.is_int64 = routing.is_int64;
    complete.num_tokens = routing.num_tokens;
    complete.narrow_topk_idx = routing.narrow_topk_idx;
    routing = complete;
}

void GpuCommunicator::plan(GpuPlanParams params, uintptr_t stream) {
    const DeviceGuard guard(device_);
    ++sequence_;
    complete(params.routing);
    params.context = context();
    launch_plan(params, reinterpret_cast<void*>(stream));
}

void GpuCommunicator::refuse(uintptr_t stream) {
    GpuPlanParams params{};
    params.cached = params.refuse = true;
    plan(params, stream);
    const DeviceGuard guard(device_);
    check_cuda(cudaStreamSynchronize(reinterpret_cast<cudaStream_t>(stream)), "cudaStreamSynchronize");
    host_->failure = {};  // this rank's caller gets the error it was refused with
    check_cuda(cudaMemset(gave_up_, 0, sizeof(int)), "cudaMemset");
}

GpuCounts GpuCommunicator::wait_counts() {
    using Clock = std::chrono::steady_clock;
    const auto deadline = Clock::now() + std::chrono::duration<double>(timeout_s_ + 10);  // the kernel's own deadline comes first
    volatile GpuCounts* counts = &host_->counts;
    for (int64_t round = 0; counts->sequence != sequence_; ++round) {
        relax_cpu();
        if (round % 1024 != 1023) continue;
        check();
        if (Clock::now() > deadline) {
            check_cuda(cudaDeviceSynchronize(), "the GPU failed");
            throw TimeoutError("rank " + std::to_string(rank_) + ": no counts from this rank's own GPU within the deadline", rank_, "counts",
                               static_cast<int64_t>(sequence_), static_cast<int64_t>(counts->sequence));
        }
    }
    std::atomic_thread_fence(std::memory_order_acquire);
    check();
    return {counts->sequence, counts->num_recv_tokens, counts->num_rows};
}

void GpuCommunicator::dispatch(GpuDispatchParams params, uintptr_t stream) {
    const DeviceGuard guard(device_);
    complete(params.routing);
    params.context = context();
    launch_dispatch(params, reinterpret_cast<void*>(stream));
}

void GpuCommunicator::combine(GpuCombineParams params, uintptr_t stream) {
    const DeviceGuard guard(device_);
    complete(params.routing);
    params.context = context();
    launch_combine(params, reinterpret_cast<void*>(stream));
}

void GpuCommunicator::check() {
    if (static_cast<volatile GpuFailure&>(host_->failure).kind == kNoFailure) return;
    const DeviceGuard guard(device_);
    check_cuda(cudaDeviceSynchronize(), "the GPU failed");
    const GpuFailure f = host_->failure;
    host_->failure = {};
    check_cuda(cudaMemset(gave_up_, 0, sizeof(int)), "cudaMemset");
    const std::string token = "topk_idx[" + std::to_string(f.expected);
    switch (f.kind) {
        case kIndexOutOfRange:
            throw std::invalid_argument(token + ", " + std::to_string(f.peer) + "] is " + std::to_string(f.seen) +
                                        "; it must be -1 (no expert) or 0 to " + std::to_string(config_.num_experts - 1));
        case kDuplicateExpert:
            throw std::invalid_argument(token + "] names expert " + std::to_string(f.seen) + " twice; a token may choose an expert once");
        case kBoundExceeded:
            throw CapacityError("rank " + std::to_string(rank_) + " would receive " + std::to_string(f.seen) +
                                    " rows, more than its num_recv_rows of " + std::to_string(f.expected) + "; give a larger bound or none", rank_);
        case kPeerRefused:
            throw PeerError("rank " + std::to_string(f.peer) + " refused its arguments; see its output for the error", f.peer);
        default: {
            const char* phase = name_of(static_cast<GpuPhase>(f.phase));
            throw TimeoutError("rank " + std::to_string(rank_) + ": rank " + std::to_string(f.peer) + " did not deliver within the deadline of " +
                                   std::to_string(static_cast<int64_t>(timeout_s_ * 1000)) + " ms; phase '" + phase + "', expected " +
                                   std::to_string(f.expected) + ", seen " + std::to_string(f.seen), f.peer, phase, f.expected, f.seen);
        }
    }
}

}  // namespace deepep_moe

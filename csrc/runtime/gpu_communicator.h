// The GPUs of one host and their calls: who owns workspace and scratch, whose memory is mapped here, what failed.
#pragma once

#include <atomic>
#include <functional>
#include <string>
#include <vector>

#include "common/errors.h"
#include "common/gpu_params.h"
#include "common/signature.h"
#include "runtime/gpu_guarded_calls.h"
#include "runtime/gpu_memory.h"

namespace deepep_moe {

// How kernels divide a GPU. Defaults are set for the device; a benchmark may vary them between calls.
struct GpuTuning {
    GpuRing ring{6, 4};            // of one block, as far as its rows are to be on their way at once
    bool uses_bulk_copies = true;  // false: 16-byte loads and stores, the only way before sm_90
    int num_receive_blocks = 64;   // of a dispatch
    int num_work_blocks = 0;       // of a combine; 0: all multiprocessors that do not send
};

class GpuCommunicator {
public:
    GpuCommunicator(const GpuWorkspaceConfig& config, int rank, int device, double timeout_s);
    ~GpuCommunicator();
    GpuCommunicator(const GpuCommunicator&) = delete;

    int64_t workspace_bytes() const { return layout_.total_bytes; }
    int64_t num_calls() const { return num_calls_; }                    // that this rank has entered or refused so far
    int64_t call_number() const { return num_calls_ + num_captured_; }  // of the last one, by which ranks know its handle again
    int num_multiprocessors() const { return num_multiprocessors_; }
    std::string handle() const { return memory_.handle(); }  // the CUDA IPC handle of the workspace, for the peers
    void connect(const std::vector<std::string>& handles) { memory_.connect(handles); }
    void set_poll(std::function<void()> poll) { poll_ = std::move(poll); }  // called now and then by waits, which end if it throws
    GpuTuning tuning;

    // While a thread makes one of the steps below. Throws std::logic_error where another one does.
    class Step {
    public:
        explicit Step(GpuCommunicator& owner);
        ~Step() { owner_.busy_.store(false); }
        Step(const Step&) = delete;

    private:
        GpuCommunicator& owner_;
    };

    // Each call begins with `plan` and goes on with the others; all enqueue work and return. Work on another stream than the last
    // call's waits for that call.
    void plan(GpuPlanParams params, const Signature& signature, uintptr_t stream);
    // Of the plan before, if it reports them. numbers: that of the call, then tokens to each rank, from each rank, for each local expert.
    GpuCounts wait_counts(int64_t* numbers);

    // `num_sms` senders and all that receive, in one launch.
    void dispatch(GpuDispatchParams params, int num_sms, uintptr_t stream);
    void combine(GpuCombineParams params, int num_sms, bool finishes, uintptr_t stream);

    // The same in two halves, so that other work may run between them: `start_*` sends beside `stream`, on `num_sms` multiprocessors
    // or, where that is 0, by copy engines; `end_*` receives on `stream`. counts: [num_ranks] rows to each rank.
    void start_dispatch(GpuDispatchParams params, int num_sms, uintptr_t stream);
    void start_combine(GpuCombineParams params, int num_sms, uintptr_t stream);
    void copy(const std::vector<int>& counts, int64_t slot_bytes, uintptr_t stream);
    void copy_block(int peer, int64_t bytes, uintptr_t stream);  // of whatever lies there, between calls: what the link gives
    void end_dispatch(GpuDispatchParams params, uintptr_t stream);
    void end_combine(GpuCombineParams params, uintptr_t stream);

    // Enters a call only to tell the peers that this rank's arguments are wrong.
    void refuse(const std::string& reason, uintptr_t stream);
    // A call goes no further: what it was given may be freed on its stream, once it is sent.
    void abandon();
    // Throws what a kernel of this rank has reported so far, once.
    void check();
    bool has_failed() const { return static_cast<const volatile GpuFailure&>(host_->failure).kind != kNoFailure; }
    GpuGuardedCalls guarded{*this};

private:
    GpuContext context() const;
    void complete(GpuRouting& routing) const;
    GpuDispatchParams completed(GpuDispatchParams params) const;
    GpuCombineParams completed(GpuCombineParams params) const;
    void allocate();
    void allocate_scratch();
    void release();
    void start_afresh();
    void wait_for_plan(const volatile unsigned long long& word, GpuPhase phase);
    void ask() const;
    void check_this_call();
    void dispatch(GpuDispatchParams params, int num_sms, bool sends, bool receives, uintptr_t stream);
    std::byte* inbox_of(int peer) const;
    std::byte* outbox_for(int peer) const;
    void count_call(cudaStream_t stream);
    void follow(cudaStream_t stream);
    bool follows_plan(cudaStream_t stream) const;
    void fork(cudaStream_t stream);
    void join(cudaStream_t stream);
    [[noreturn]] void raise(const GpuFailure& failure) const;
    GpuFailure in_calls(GpuFailure failure) const;
    std::string describe(const GpuFailure& failure, int rank) const;
    std::string reason_of(int peer, int parity) const;
    GpuStamp stamp_of(int peer, int parity) const;
    long long last_call_of(int peer) const;

    const GpuWorkspaceConfig config_;
    const GpuWorkspaceLayout layout_;
    const int rank_, device_, owner_pid_;
    const double timeout_s_;
    int num_multiprocessors_ = 0, shared_bytes_ = 0;
    GpuMemory memory_;
    std::byte* scratch_ = nullptr;
    GpuRouting scratch_routing_{};
    GpuState* state_ = nullptr;
    int64_t num_calls_ = 0, num_captured_ = 0;          // the latter: in the capture of a graph that the last call was in
    unsigned long long capture_ = 0, sends_in_ = 0;     // captures: of the last call, and of the one that sends beside its stream; 0: none
    unsigned long long num_plans_ = 0, void_plan_ = 0;  // void: its failure was raised, so its second half is not to be waited for
    std::function<void()> poll_;
    std::atomic<bool> busy_ = false;
    struct HostSlots {
        GpuFailure failure;
        GpuCounts counts;
    };
    HostSlots* host_ = nullptr;     // pinned, and behind it
    int* expert_counts_ = nullptr;  // [num_local_experts]

    cudaStream_t sending_ = nullptr, copying_ = nullptr, announcing_ = nullptr;  // own streams, beside the caller's
    LastStreams last_;
    bool is_sending_ = false, has_early_launch_ = false;
    cudaEvent_t forked_ = nullptr, sent_ = nullptr, copied_ = nullptr, followed_ = nullptr;
};

}  // namespace deepep_moe

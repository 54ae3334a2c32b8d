// Runs the host's side of dispatch and combine between the GPUs of one host. csrc/torch makes the calls; Python refuses, checks and
// settles.
//
//   Dispatch           Allocate by guess, plan, send (and receive), wait for the counts, allocate what the guess lacked, receive.
//   Late               Dispatch, where the caller enqueues work on the guessed rows before the host waits for the counts.
//   Bounded            Allocate the bound, plan, send and receive. The host does not wait.
//   Cached, combine    Plan, send and receive.
//   Split              As above without `receive`, which the caller starts later by `end`.
//   Several nodes      Before the plan the rank meets those of its rail. Rows cross beside the node's kernels (rail.h).
//   No SMs (0)         Senders pack rows into the outbox, the host waits for the peers, copy engines send, then receive.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "common/errors.h"
#include "cuda/tuning.h"
#include "runtime/nvlink/call.h"
#include "runtime/nvlink/failures.h"
#include "runtime/nvlink/memory.h"
#include "runtime/nvlink/rail.h"
#include "runtime/nvlink/streams.h"

namespace deepep_moe {

// Allocate the outputs of a dispatch that receives `num_rows` rows, and set them in the call (`GpuDispatchCall::receive_into`). It may
// throw. It is called twice if a guess was too small, else once.
using Allocate = std::function<void(int64_t num_rows, bool is_guess)>;

constexpr size_t kMaxGuesses = 4096;  // guesses that a buffer keeps

// Guesses how many rows to allocate before they are counted, so that the kernel that receives need not wait for the host.
class RowGuess {
public:
    static constexpr int64_t kShare = 16;  // 1 / kShare more rows than last time are allocated

    // Returns a little more than the last count if that was close to the one before, or -1 for no guess.
    int64_t room() const { return last_ < 0 || std::max(last_ - before_, before_ - last_) * kShare > last_ ? -1 : last_ + last_ / kShare; }
    void remember(int64_t num_rows) { before_ = std::exchange(last_, num_rows); }

private:
    int64_t last_ = -1, before_ = -1;  // rows of the last two dispatches
};

class NvlinkExchange {
public:
    NvlinkExchange(const GpuWorkspaceConfig& config, int rank, int device, double timeout_s);
    ~NvlinkExchange();
    NvlinkExchange(const NvlinkExchange&) = delete;

    int64_t workspace_bytes() const { return layout_.total_bytes; }
    int64_t num_calls() const { return num_calls_; }  // calls that this rank has entered or refused so far
    int num_local_experts() const { return config_.num_experts / config_.num_ranks; }
    const GpuWorkspaceConfig& config() const { return config_; }
    int num_multiprocessors() const { return num_multiprocessors_; }
    // The peers need to know `handle`, and to map `share`, a new descriptor of the workspace.
    std::string handle() const { return memory_.handle(); }
    int share() const { return memory_.share(); }
    void connect(const std::vector<std::string>& handles, const std::vector<int>& descriptors) { memory_.connect(handles, descriptors); }
    // Unmap the peers' workspaces, between calls. Once all ranks have done so, each may call `free`, and later `resume`, `handle` and
    // `connect`. Calls of the same numbers go on then; a split call must be over before, and a late dispatch is lost.
    void disconnect() { memory_.disconnect(); }
    void free();
    void resume();
    // Let the peers know that this rank makes no more calls, while tensors of its expert slots keep this object alive.
    void leave();
    int64_t rail_bytes() const { return RailLayout(config_).total_bytes; }  // bytes of symmetric memory
    // Call it with several nodes, before any call. The one address in `bases` is that of this rank's symmetric memory, zeroed and allocated
    // on all ranks; it must outlive this object. `pes` has NVSHMEM's numbers of the ranks of this index, by node.
    void attach_rail(const RailShim& shim, const std::vector<uintptr_t>& bases, const std::vector<int>& pes);
    void set_poll(std::function<void()> poll) { poll_ = std::move(poll); }  // waits call it now and then, and end if it throws
    GpuTuning tuning;
    bool allows_excess = false;  // rows beyond a bound are left out without a failure

    // All calls enqueue work on the mode's stream, or beside it if they send separately, and return. A call on another stream than the last
    // one waits for that call. They throw CallError if two threads are in calls of one buffer.

    // Return the number of rows that come; the outputs may have room for more. `numbers` is host memory of num_handle_numbers. It gets the
    // call's number, then the tokens to each rank, from each rank, and for each local expert. With a bound all except the first are -1,
    // and the bound is returned.
    int64_t dispatch(GpuDispatchCall& call, const CallMode& mode, int64_t* numbers, const Allocate& allocate);
    // Finish a late dispatch, which has returned its room with all numbers except the first -1, on the mode's stream. It is allowed while
    // `can_count`: no call or refusal has come since, and no failure was thrown. Returns the number of rows; if they did not fit, they are
    // in new outputs.
    bool can_count() const { return late_plan_ == num_plans_ && !is_void(); }
    int64_t count_late(GpuDispatchCall& call, const CallMode& mode, int64_t* numbers, const Allocate& allocate);
    void dispatch_cached(const GpuDispatchCall& call, const CallMode& mode);  // the outputs must be set
    void combine(const GpuCombineCall& call, const CallMode& mode);
    // Fetch copies of experts, or return their gradients. It fills in context, ring and blocks of `params`.
    void move_experts(GpuExpertSlotsParams params, const Signature& signature, const CallMode& mode);
    uintptr_t workspace() const { return reinterpret_cast<uintptr_t>(memory_.of(rank_)); }
    uintptr_t expert_slots() const { return workspace() + layout_.expert_slots; }
    // Make the second half of a split call, on a stream that may differ from the first half's.
    template <class Call>  // GpuDispatchCall or GpuCombineCall
    void end(const Call& call, uintptr_t stream);
    // Enter a call only to tell the peers that this rank does not make it. The host does not wait, and the GPU waits only if this rank has
    // refused kStamps - 1 calls that some peer has not entered.
    void refuse(const std::string& reason, int cause, uintptr_t stream);

    // Wait for the GPU, clear reported failures, and return how many calls the GPU has entered or refused; replays of graphs count.
    int64_t settle();
    // Throw the failure that a kernel of this rank has reported, once.
    void check();
    // With several nodes, throws a failure that `check` has thrown but other nodes do not know, until `refuse` has told them.
    void check_untold();
    bool has_failed() const { return deepep_moe::has_failed(host_->failure) || !is_told_; }  // `check` or `check_untold` would throw
    bool is_void() const { return void_plan_ == num_plans_; }  // a kernel's failure in the last call has been thrown

private:
    class Step;  // it lives while one thread makes a call
    int num_senders(const CallMode& mode, int most_useful) const;
    const int64_t* counts_for_copies(const int64_t* numbers, int num_sms, bool is_dispatch) const;

    // With several nodes the node's deadline is later than the rail's. A rank that waits for its rail in vain must report that before the
    // ranks of its node, which wait for it, blame it.
    double node_timeout_s() const { return timeout_s_ * (config_.num_nodes == 1 ? 1.0 : 1.5); }
    GpuContext context() const;
    void complete(GpuRouting& routing) const;
    GpuRing ring_of(const GpuRing& wished, int64_t row_bytes, int64_t tail_bytes) const;
    template <class Params>
    Params completed(Params params, int64_t row_bytes, int64_t tail_bytes) const;
    GpuCombineParams completed(const GpuCombineParams& params) const;
    int64_t row_bytes_of(DType dtype) const { return config_.hidden * static_cast<int64_t>(element_bytes(dtype)); }
    int max_tile_pieces() const { return config_.num_ranks > 2 ? tuning::kPiecesForLink : tuning::kPiecesForMemory; }
    void allocate_scratch();

    void plan(GpuPlanParams params, const Signature& signature, const RailCall& rail, bool moves, cudaStream_t stream);
    void move_on_rail(int64_t row_bytes);
    void count_call(cudaStream_t stream);
    int64_t call_number() const { return num_calls_ + num_captured_; }
    int64_t wait_counts(int64_t* numbers);
    int64_t receive_counted(GpuDispatchCall& call, const CallMode& mode, int num_sms, int64_t room, int64_t* numbers,
                            const Allocate& allocate);
    RowGuess& guess_of(const GpuDispatchCall& call, const CallMode& mode);
    void wait_for_plan(const volatile unsigned long long& word, GpuPhase phase);
    void ask() const;
    // Make the first half of a call with num_sms SMs that send, or with 0 for copy engines; if it `finishes`, also the second half, with 0
    // only that.
    void launch(const GpuDispatchParams& params, int num_sms, bool finishes, cudaStream_t stream);
    void launch(const GpuCombineParams& params, int num_sms, bool finishes, cudaStream_t stream);
    template <class Params>
    void move_along(const Params& params, const CallMode& mode, int num_sms, const int64_t* counts, int64_t slot_bytes);
    template <class Params>
    void start(const Params& params, int num_sms, cudaStream_t stream);
    void send_by_copies(const int64_t* counts, int64_t slot_bytes, cudaStream_t stream);
    void finish(const GpuDispatchParams& params, cudaStream_t stream);
    void finish(const GpuCombineParams& params, cudaStream_t stream);
    void join(cudaStream_t stream);
    void join_rail(cudaStream_t stream);
    bool follows_plan(cudaStream_t stream) const;
    int num_sms_of_call() const;
    int num_rail_sms() const;
    int max_segments() const;

    void* state_words() const { return &state_->gave_up; }
    [[noreturn]] void raise(const GpuFailure& failure) const;
    GpuFailure in_calls(GpuFailure failure, int reporter) const;
    GpuFailure origin(GpuFailure failure) const;
    std::string describe(const GpuFailure& failure, int reporter) const;
    std::string reason_of(int peer, long long call) const;
    GpuStamp stamp_of(int peer, long long call) const;
    bool may_be_overwritten(int peer, long long call) const;
    int num_stamps(int peer) const;
    unsigned long long last_entry_of(int peer) const;
    long long last_call_of(int peer) const;

    const GpuWorkspaceConfig config_;
    const GpuWorkspaceLayout layout_;
    const int rank_, device_, owner_pid_;
    const double timeout_s_;
    int num_multiprocessors_ = 0, shared_bytes_ = 0, plan_blocks_per_multiprocessor_ = 0;
    GpuMemory memory_;
    const RankNumbers numbers_;
    Failures failures_;
    DeviceMemory scratch_;
    GpuRouting scratch_routing_{};
    GpuState* state_ = nullptr;
    std::atomic<int64_t> num_calls_ = 0;                // another thread may ask
    int64_t num_captured_ = 0;                          // calls in the graph capture that the last call was in
    unsigned long long capture_ = 0;                    // the graph capture that the last call was in, or 0
    unsigned long long late_plan_ = 0;                  // number of the last late dispatch's plan
    unsigned long long num_plans_ = 0, void_plan_ = 0;  // the failure of void_plan_ was thrown, so its second half must not be waited for
    GpuFailure lack_{};                                 // the last lack of room that `check` has thrown
    bool is_told_ = true;                               // other nodes know of lack_
    std::function<void()> poll_;
    std::atomic<bool> busy_ = false;
    struct HostSlots {
        GpuFailure failure;
        GpuCounts counts;
    };
    Owned<HostSlots*, &cudaFreeHost> host_;  // pinned, followed by
    int* expert_counts_ = nullptr;           // [num_local_experts]

    LastStreams last_;
    SendStreams streams_;
    std::unique_ptr<Rail> rail_;                                  // only with several nodes
    std::map<std::tuple<int64_t, bool, int>, RowGuess> guesses_;  // key: the caller's layer, layout and alignment
    bool has_early_launch_ = false;
};

}  // namespace deepep_moe

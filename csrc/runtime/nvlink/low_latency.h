// Makes low-latency calls of the GPUs of one host, or with a rail of several nodes. It owns workspace and counters, launches kernels and
// raises failures.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "common/errors.h"
#include "cuda/launch.h"
#include "runtime/nvlink/failures.h"
#include "runtime/nvlink/rail.h"
#include "runtime/nvlink/memory.h"
#include "runtime/nvlink/streams.h"

namespace deepep_moe {

class NvlinkLowLatency {
public:
    // ranks_per_node consecutive ranks map each other's memory. If these are not all, call `attach_rail` before any call.
    NvlinkLowLatency(const LowLatencyConfig& config, int rank, int device, double timeout_s, bool masks_stalled, int ranks_per_node);
    ~NvlinkLowLatency();
    NvlinkLowLatency(const NvlinkLowLatency&) = delete;

    const LowLatencyConfig& config() const { return config_; }
    int64_t workspace_bytes() const { return layout_.total_bytes; }
    // A failed handle holds this mark xor the number of its dispatch.
    int64_t failed_mark() const { return static_cast<int64_t>(failed_mark_); }
    int64_t handle_bytes() const;
    int64_t num_calls() const { return num_calls_; }  // calls that this rank has sent or refused so far
    int64_t rail_bytes() const { return LowLatencyRailLayout(config_, num_nodes()).total_bytes; }  // bytes of symmetric memory
    std::string handle() const;                                                                    // with the bus of the GPU
    int share() const { return memory_.share(); }
    // Throws if a peer's GPU is reached without NVLink: rows rely on a property (cuda/low_latency.h) that is not known of such links.
    void connect(const std::vector<std::string>& handles, const std::vector<int>& descriptors);  // takes those of the ranks of this node
    // NvlinkExchange says what the next three do. All calls must be received before.
    void disconnect() { memory_.disconnect(); }
    void free() { memory_.free(); }
    void resume();
    // LowLatencyRail describes the arguments.
    void attach_rail(const RailShim& shim, const std::vector<uintptr_t>& bases, const std::vector<int>& pes);
    // Upper bound of a kernel's blocks; all must be on the GPU at once. `.ci/sanitize` takes fewer.
    int num_blocks;

    // Calls enqueue work and return. Work on another stream than the last call's waits for that call.
    template <class Params>  // LowLatencyDispatchParams or LowLatencyCombineParams
    void make(const Params& params, bool sends, bool receives, uintptr_t stream);
    void refuse(const std::string& reason, uintptr_t stream);  // waits for nobody

    // These wait for the GPU, so that `masks` shows their effect.
    void mask(int rank, bool masked, uintptr_t stream);
    void rejoin(uintptr_t stream);
    unsigned masks() const;  // bit r: rank r is masked, as far as the GPU has told

    bool has_failed() const;  // whether kernels of this rank have reported a failure
    void check();             // throw it, once

private:
    int num_nodes() const { return config_.num_ranks / ranks_per_node_; }
    void check_link(int rank, const std::string& bus) const;
    LowLatencyContext context() const;
    void control(LowLatencyControlParams& params, uintptr_t stream);
    void begin(bool sends, uintptr_t stream);
    void end(bool sends);
    GpuFailure forget_failure();
    [[noreturn]] void raise(const GpuFailure& failure) const;
    std::string describe(const GpuFailure& failure, int reporter) const;
    std::string describe_mismatch(const GpuFailure& failure, int reporter) const;
    std::string reason_of(int peer, long long call) const;

    const LowLatencyConfig config_;
    const GpuLowLatencyLayout layout_;
    const int rank_, ranks_per_node_, first_rank_, device_, owner_pid_;  // first_rank_: of this node
    const double timeout_s_;
    const bool masks_stalled_;
    unsigned long long failed_mark_;
    GpuMemory memory_;
    std::unique_ptr<LowLatencyRail> rail_;
    Failures failures_;
    DeviceMemory counters_;
    LowLatencyState* state_ = nullptr;
    struct HostSlots {
        GpuFailure failure;
        unsigned masks;
    };
    Owned<HostSlots*, &cudaFreeHost> host_;  // pinned
    LastStreams last_;
    std::mutex enqueuing_;                // one thread enqueues at a time: one may send while another receives
    std::atomic<int64_t> num_calls_ = 0;  // another thread may ask
    int num_to_catch_up_ = 0;             // calls whose call before last may have been refused, or have failed
};

}  // namespace deepep_moe

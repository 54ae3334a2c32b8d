// Makes and frees what an exchange owns: the workspace that peers write to, scratch of this rank, pinned words, streams.
#include <unistd.h>

#include <stdexcept>

#include "cuda/launch.h"
#include "runtime/nvlink/exchange.h"

namespace deepep_moe {

NvlinkExchange::NvlinkExchange(const GpuWorkspaceConfig& config, int rank, int device, double timeout_s)
    : config_(config),
      layout_(config),
      rank_(rank),
      device_(device),
      owner_pid_(getpid()),
      timeout_s_(timeout_s),
      memory_(config.num_ranks, rank, device),
      numbers_{config.num_ranks, config.node, rank},
      failures_(memory_, numbers_, config.num_nodes * config.num_experts, node_timeout_s(), timeout_s) {
    const DeviceGuard guard(device_);
    num_multiprocessors_ = attribute(cudaDevAttrMultiProcessorCount, device_);
    shared_bytes_ = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device_);
    has_early_launch_ = tuning.uses_bulk_copies = attribute(cudaDevAttrComputeCapabilityMajor, device_) >= 9;
    if (config_.num_slots() >= static_cast<int64_t>(kRefused))
        throw std::invalid_argument("num_max_tokens_per_rank is " + std::to_string(config_.num_max_tokens) + "; this backend counts to " +
                                    std::to_string((kRefused - 1) / (config_.num_slots() / config_.num_max_tokens)));
    const int64_t plan_bytes = plan_shared_bytes(config_);
    if (plan_bytes > shared_bytes_ - kStaticSharedBytes)
        throw std::runtime_error(std::to_string(config_.num_experts) + " experts need " + std::to_string(plan_bytes) +
                                 " bytes of shared memory for their counts, this GPU has " + std::to_string(shared_bytes_) + " a block");
    plan_blocks_per_multiprocessor_ = plan_blocks_per_multiprocessor(config_);
    if (max_segments() < config_.num_nodes)
        throw std::runtime_error("this GPU, or what this process may use of it, holds " + std::to_string(max_segments()) +
                                 " blocks of a plan with " + std::to_string(config_.num_experts) + " experts at once; " +
                                 std::to_string(config_.num_nodes) + " nodes need one each");
    memory_.allocate(layout_.total_bytes, layout_.inbox, layout_.left);
    host_ = new_pinned<HostSlots>(sizeof(int) * num_local_experts());
    expert_counts_ = reinterpret_cast<int*>(static_cast<HostSlots*>(host_) + 1);
    allocate_scratch();
    failures_.create();
    last_.create();
    streams_.create();
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

void NvlinkExchange::allocate_scratch() {
    const int64_t n = config_.num_max_tokens;
    GpuRouting& r = scratch_routing_;
    const Array arrays[] = {array_of(&state_, 1),
                            array_of(&r.reduced, config_.num_ranks * layout_.num_reduced),
                            array_of(&r.segment_counts, tuning::kMaxSegments * layout_.columns),
                            array_of(&r.warp_counts, tuning::kMaxSegments * kPlanWarps * layout_.columns),
                            array_of(&r.index_in_warp, n * config_.num_topk),
                            array_of(&r.expert_row_base, config_.num_nodes * config_.num_experts),
                            array_of(&r.send_slot, n * config_.num_ranks),
                            array_of(&r.send_token, n * config_.num_ranks),
                            array_of(&r.send_counts, config_.num_sources()),
                            array_of(&r.recv_first, config_.num_sources())};
    allocate_arrays(scratch_, arrays, "cannot allocate the scratch");
}

void NvlinkExchange::free() {
    void_plan_ = num_plans_;
    memory_.free();
}

// All flags are 0 then, which is older than any call. A plan that looks for an earlier call would wait for it, so this rank notes that all
// ranks have met in the last one.
void NvlinkExchange::resume() {
    const DeviceGuard guard(device_);
    memory_.allocate(layout_.total_bytes, layout_.inbox, layout_.left);
    check_cuda(cudaMemcpy(&state_->last_met, &state_->sequence, sizeof(state_->sequence), cudaMemcpyDeviceToDevice), "cudaMemcpy");
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

void NvlinkExchange::leave() {
    const DeviceGuard guard(device_);
    memory_.leave();
}

NvlinkExchange::~NvlinkExchange() {
    if (getpid() != owner_pid_) return;  // a forked child has no CUDA
    const DeviceGuard guard(device_, std::nothrow);
    cudaDeviceSynchronize();
    rail_.reset();
}

void NvlinkExchange::attach_rail(const RailShim& shim, const std::vector<uintptr_t>& bases, const std::vector<int>& pes) {
    const DeviceGuard guard(device_);
    load_combine_of_nodes();
    rail_ = std::make_unique<Rail>(config_, shim, reinterpret_cast<std::byte*>(bases.at(0)), pes, timeout_s_);
}

}  // namespace deepep_moe

// Declares the launchers of the GPU kernels. All are asynchronous on `stream` (a cudaStream_t), and throw std::runtime_error if CUDA fails.
#pragma once

#include "common/gate.h"
#include "cuda/low_latency_rail.h"
#include "cuda/params.h"

namespace deepep_moe {

void launch_plan(const GpuPlanParams& params, void* stream);
int64_t plan_shared_bytes(const GpuWorkspaceConfig& config);
int plan_blocks_per_multiprocessor(const GpuWorkspaceConfig& config);
// With `early` these may start while the plan before them on the stream still runs. They then wait for the parts of it that they need.
void launch_dispatch(const GpuDispatchParams& params, void* stream, bool early);
void launch_combine(const GpuCombineParams& params, void* stream, bool early);
void load_combine_of_nodes();  // before calls over several nodes: the rail's kernel waits for this one, so loading it must not block
void launch_quantize(const GpuQuantizeParams& params, void* stream);
void launch_quantize_weights(const GpuQuantizeWeightsParams& params, void* stream);
void launch_expert_slots(const GpuExpertSlotsParams& params, void* stream);
void launch_weighted_sum(const GpuWeightedSumParams& params, void* stream);
void launch_weighted_sum_backward(const GpuWeightedSumParams& params, void* stream);
void launch_clear_tail(const GpuClearTailParams& params, void* stream);
void launch_swiglu(const GpuSwigluParams& params, void* stream);
void launch_swiglu_backward(const GpuSwigluParams& params, void* stream);
// Returns false where the GPU, or what the library is built for, is not of compute capability 9.0; nothing is launched then.
bool launch_add_weight_gradients(const GpuWeightGradientParams& params, void* stream);
// Rows after the last group's are not set. For GPUs of compute capability 9.0.
void launch_fp8_product(const GpuFp8ProductParams& params, void* stream);
void launch_fp8_weight_gradient(const GpuFp8ProductParams& params, void* stream);
void launch_gate(const GpuGateParams& params, void* stream);
void launch_gate_backward(const GpuGateBackwardParams& params, void* stream);
void launch_top2(const GpuTop2Params& params, void* stream);
void launch_top2_backward(const GpuTop2BackwardParams& params, void* stream);
void launch_lanes_of_map(const LanesOfMapParams& params, void* stream);
void launch_dense_of_lanes(const DenseOfLanesParams& params, void* stream);
void launch_count_lanes(const CountLanesParams& params, void* stream);
void launch_plan_copies(const CopyPlanParams& params, void* stream);
void launch_rows_of_copies(const RowsOfCopiesParams& params, void* stream);

// Sets the flags of the `num_slots` slots from `first_slot` on that a copy engine has filled in the inbox of `peer`.
struct GpuAnnounceParams {
    GpuContext context;
    int peer, first_slot, num_slots;
};
void launch_announce(const GpuAnnounceParams& params, void* stream);

// ---- low latency ----

void launch_low_latency(LowLatencyLaunch<LowLatencyDispatchParams> launch, void* stream);
void launch_low_latency(LowLatencyLaunch<LowLatencyCombineParams> launch, void* stream);
// Return the shared memory of a block: for a dispatch with any type of rows, and for a combine.
int64_t low_latency_shared_bytes(const LowLatencyConfig& config);
int64_t low_latency_combine_shared_bytes();
// Blocks of either kernel that one SM of the current device holds at once, at most two.
int low_latency_blocks_per_multiprocessor(const LowLatencyConfig& config);
int low_latency_combine_blocks_per_multiprocessor();
// These launch the receiving halves over nodes.
void launch_low_latency_receive(LowLatencyRailDispatch launch, void* stream);
void launch_low_latency_relay(LowLatencyRailDispatch launch, void* stream);  // before the receiving half of a dispatch
void launch_low_latency_finish(LowLatencyRailCombine launch, void* stream);
void launch_low_latency_control(const LowLatencyControlParams& params, void* stream);

// ---- sizes ----

// Return the ring for rows of this size: the wished one if it fits into tuning::kRingBytes of shared memory a block, else a smaller one, at
// least three rows of one warp. If these do not fit into `shared_bytes`, the ring has no stages.
GpuRing fit_ring(GpuRing wished, int64_t row_bytes, int64_t tail_bytes, int64_t shared_bytes);

}  // namespace deepep_moe

// Describes a call of the exchange by tensors and a handle.
#pragma once

#include "common/tensor_arg.h"
#include "common/signature.h"
#include "cuda/rail.h"

namespace deepep_moe {

// Streams come as addresses. This bit says that the stream's owner may destroy it once the call is made.
constexpr uintptr_t kExternalStream = uintptr_t{1} << 63;

// Says how a call is made. Results do not depend on it.
struct CallMode {
    int num_sms = -1;       // SMs that send; 0 for copy engines, -1 for what GpuTuning says
    bool is_split = false;  // the caller starts the second half later
    uintptr_t stream = 0;   // stream of the call
    int64_t layer = 0;      // number of the model's layer that makes the call; rows are guessed for each layer separately
    bool is_late = false;   // a dispatch that has a guess returns before the counts are there (NvlinkExchange::count_late)
};

// With several nodes this is the part of a call that crosses. The rest of the call is then about the tokens that are in this node.
struct RailCall {
    RailMeetCall meet{};
    RailMoveCall move{};
};

inline GpuRouting routing_of(const TensorArg& topk_idx, int64_t token_stride, int64_t lane_stride = 1) {
    GpuRouting routing{};  // the exchange fills in its scratch
    static_cast<GpuTopkIdx&>(routing) = {topk_idx.as<const void*>(), token_stride, lane_stride, topk_idx.element_bytes == 8,
                                         static_cast<int>(topk_idx.num_rows)};
    return routing;
}

// Returns the plan of a cached dispatch or a combine.
inline GpuPlanParams cached_plan(const HandleArg& handle) {
    GpuPlanParams plan{};
    plan.routing = routing_of(handle.topk_idx, handle.topk_idx.num_columns);
    plan.cached = true;
    plan.recv_counts = handle.recv_counts.as<int32_t*>();
    plan.is_expert_layout = handle.is_expert_layout;
    plan.expert_alignment = 1;
    plan.num_recv_rows_bound = -1;
    return plan;
}

inline GpuPlanParams fresh_plan(const HandleArg& handle, const MatrixArg& topk_idx, int64_t num_recv_rows) {
    GpuPlanParams plan{};
    plan.routing = routing_of(topk_idx, topk_idx.row_stride, topk_idx.column_stride);
    plan.routing.narrow_topk_idx = handle.topk_idx.as<int32_t*>();
    plan.reports_counts = num_recv_rows < 0;
    plan.is_expert_layout = handle.is_expert_layout;
    plan.expert_alignment = handle.expert_alignment;
    plan.num_recv_rows_bound = num_recv_rows;
    plan.recv_counts = handle.recv_counts.as<int32_t*>();
    plan.num_recv_tokens_per_expert = handle.num_recv_tokens_per_expert.as<int32_t*>();
    return plan;
}

inline RowScaling scaling_of(const TensorArg& weights, const TensorArg& x, const ExpertRows* expert_rows, const TensorArg& grad_weights,
                             DType dtype) {
    return {dtype, weights.as<const float*>(), x.as<const std::byte*>(), expert_rows == nullptr ? ExpertRows{} : *expert_rows,
            grad_weights.as<float*>()};
}

// If the handle has several nodes, limit the plan to the tokens in this node, and return the part of the call that crosses.
inline RailCall split_off_rail(const HandleArg& handle, GpuPlanParams& plan) {
    RailCall rail;
    if (!handle.node_topk_idx.is_there) return rail;
    rail.meet.cached = plan.cached;
    rail.meet.topk = plan.routing;
    rail.meet.narrow_topk_idx = plan.routing.narrow_topk_idx;
    plan.routing = routing_of(handle.node_topk_idx, handle.node_topk_idx.num_columns);
    rail.meet.node_topk_idx = handle.node_topk_idx.as<int32_t*>();
    rail.meet.in_counts = handle.in_counts.as<int32_t*>(), rail.move.in_counts = rail.meet.in_counts;
    return rail;
}

struct GpuDispatchCall {
    GpuPlanParams plan;
    RailCall rail;
    GpuDispatchParams params{};
    Signature signature{};
    const int64_t* numbers = nullptr;  // numbers of the handle, if cached

    // A cached dispatch has None for topk_idx; any other dispatch fills the handle. num_recv_rows is -1 without a bound.
    GpuDispatchCall(const HandleArg& handle, const TensorArg& x, const TensorArg& x_scales, const MatrixArg& topk_idx,
                    const MatrixArg& topk_weights, DType dtype, int64_t num_recv_rows) {
        const bool cached = !topk_idx.is_there;
        numbers = cached ? handle.call : nullptr;
        plan = cached ? cached_plan(handle) : fresh_plan(handle, topk_idx, num_recv_rows);
        rail = split_off_rail(handle, plan);
        params.routing = plan.routing;
        params.routing.narrow_topk_idx = nullptr;
        params.cached = cached;
        params.has_lanes = !cached || topk_weights.is_there;
        params.is_expert_layout = handle.is_expert_layout;
        params.expert_alignment = handle.expert_alignment;
        params.row_bytes = x.row_bytes();
        params.scale_bytes = x_scales.is_there ? x_scales.row_bytes() : 0;
        params.num_x_rows = static_cast<int>(x.num_rows);
        params.x = x.as<const std::byte*>();
        params.x_scales = x_scales.as<const std::byte*>();
        params.topk_weights = {topk_weights.as<const float*>(), topk_weights.row_stride, topk_weights.column_stride};
        params.recv_counts = handle.recv_counts.as<int32_t*>();
        params.num_recv_tokens_per_expert = handle.num_recv_tokens_per_expert.as<const int32_t*>();
        params.recv_row_idx = handle.recv_row_idx.as<int32_t*>();
        rail.meet.has_weights = topk_weights.is_there;
        rail.meet.topk_weights = params.topk_weights;
        rail.move.row_bytes = params.row_bytes, rail.move.tail_bytes = params.scale_bytes;
        rail.move.x = params.x, rail.move.x_scales = params.x_scales;
        signature = {cached ? Operation::kCachedDispatch : Operation::kDispatch,
                     dtype,
                     handle.layout(),
                     plan.expert_alignment,
                     cached ? handle.number() : 0,
                     topk_weights.is_there,
                     x_scales.is_there,
                     false};
    }

    // Set the outputs. GpuDispatchParams says what is_guess means.
    void receive_into(const TensorArg& recv_x, const TensorArg& recv_x_scales, const TensorArg& recv_topk_idx,
                      const TensorArg& recv_topk_weights, bool is_guess) {
        params.num_rows = recv_x.num_rows;
        params.recv_x = recv_x.as<std::byte*>();
        params.recv_x_scales = recv_x_scales.as<std::byte*>();
        params.recv_topk_idx = recv_topk_idx.as<void*>();
        params.recv_topk_idx_is_int64 = recv_topk_idx.element_bytes == 8;
        params.recv_topk_weights = recv_topk_weights.as<float*>();
        params.is_guess = is_guess;
    }

    int64_t slot_bytes() const { return GpuSlotLayout(params.row_bytes, params.scale_bytes).bytes; }
};

struct GpuCombineCall {
    GpuPlanParams plan;
    RailCall rail;
    GpuCombineParams params{};
    Signature signature{};
    const int64_t* numbers = nullptr;  // numbers of the handle
    int64_t row_bytes = 0;

    GpuCombineCall(const HandleArg& handle, const TensorArg& x, const ExpertRows* expert_rows, const TensorArg& weights,
                   const TensorArg& bias, const TensorArg& topk_weight_grads, const TensorArg& source_weights, const TensorArg& combined_x,
                   const TensorArg& combined_topk_weight_grads, DType dtype, const CombineOptions& options) {
        const int64_t num_rows = expert_rows == nullptr ? x.num_rows : handle.num_rows;
        plan = cached_plan(handle);
        rail = split_off_rail(handle, plan);
        numbers = handle.call;
        params.routing = plan.routing;
        params.is_expert_layout = handle.is_expert_layout;
        params.has_topk_weight_grads = topk_weight_grads.is_there;
        params.dtype = dtype;
        params.num_rows = num_rows;
        params.recv_counts = handle.recv_counts.as<const int32_t*>();
        params.recv_row_idx = handle.recv_row_idx.as<const int32_t*>();
        params.x = x.as<const std::byte*>();
        if (expert_rows != nullptr) params.expert_rows = *expert_rows;
        params.weights = weights.as<const float*>();
        params.bias = bias.as<const std::byte*>();
        params.topk_weight_grads = topk_weight_grads.as<const float*>();
        params.tokens_per_row = combined_x.num_rows == 0 ? 1 : static_cast<int>(handle.topk_idx.num_rows / combined_x.num_rows);
        params.source_weights = source_weights.as<const float*>();
        params.combined_x = combined_x.as<std::byte*>();
        params.combined_topk_weight_grads = combined_topk_weight_grads.as<float*>();
        params.options = options;
        const bool are_single = !handle.is_expert_layout || (handle.topk_idx.num_columns == 1 && expert_rows == nullptr);
        params.direct = are_single && !weights.is_there && topk_weight_grads.address % kRowAlignment == 0;
        params.context.config.num_topk = static_cast<int>(handle.topk_idx.num_columns);  // for `tail_bytes`
        row_bytes = x.row_bytes();
        rail.move.is_combine = true;
        rail.move.row_bytes = row_bytes, rail.move.tail_bytes = params.tail_bytes();
        signature = {Operation::kCombine, dtype, handle.layout(), 1, handle.number(), false, false, topk_weight_grads.is_there};
    }

    int64_t slot_bytes() const { return GpuSlotLayout(row_bytes, params.tail_bytes()).bytes; }
};

}  // namespace deepep_moe

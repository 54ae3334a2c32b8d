// Describes a call of the exchange by tensors and a handle.
#pragma once

#include "common/handle_arg.h"
#include "common/signature.h"
#include "runtime/shm/exchange.h"

namespace deepep_moe {

// Larger outputs are written past the caches, which could not hold them anyway.
constexpr int64_t kStreamingBytes = 8 << 20;

// Each holds inputs and outputs of a call.
struct DispatchArg {
    TensorArg x, x_scales, topk_weights, recv_x, recv_x_scales, recv_topk_idx, recv_topk_weights;
};
struct CombineArg {
    TensorArg x, weights, bias, topk_weight_grads, combined_x, combined_topk_weight_grads;
    CombineOptions options{};
};

inline PlanParams plan_of(const WorkspaceConfig& config, const Signature& signature, const TensorArg& topk_idx, int64_t num_recv_rows) {
    PlanParams plan{};
    plan.signature = signature;
    plan.layout.topk_idx = topk_idx.as<const void*>();
    plan.layout.is_int64 = topk_idx.element_bytes == 8;
    plan.layout.num_tokens = topk_idx.num_rows;
    plan.layout.num_topk = config.num_topk;
    plan.layout.num_ranks = config.num_ranks;
    plan.layout.num_experts = config.num_experts;
    plan.num_recv_rows_bound = num_recv_rows;
    return plan;
}

inline DispatchParams dispatch_of(const WorkspaceConfig& config, const HandleArg& handle, const DispatchArg& arg, bool cached) {
    DispatchParams params{};
    params.layout = handle.layout();
    params.cached = cached;
    params.streaming = arg.recv_x.num_rows * arg.recv_x.row_bytes() > kStreamingBytes;
    params.num_topk = config.num_topk;
    params.num_experts = config.num_experts;
    params.row_bytes = static_cast<size_t>(arg.x.row_bytes());
    params.scale_bytes = arg.x_scales.is_there ? static_cast<size_t>(arg.x_scales.row_bytes()) : 0;
    params.num_tokens = handle.topk_idx.num_rows;
    params.x = arg.x.as<const std::byte*>();
    params.x_scales = arg.x_scales.as<const std::byte*>();
    params.topk_idx = handle.topk_idx.as<const int32_t*>();
    params.topk_weights = arg.topk_weights.as<const float*>();
    params.recv_counts = handle.recv_counts.as<const int32_t*>();
    params.recv_x = arg.recv_x.as<std::byte*>();
    params.recv_x_scales = arg.recv_x_scales.as<std::byte*>();
    params.recv_topk_idx = arg.recv_topk_idx.as<void*>();
    params.recv_topk_idx_is_int64 = arg.recv_topk_idx.element_bytes == 8;
    params.recv_topk_weights = arg.recv_topk_weights.as<float*>();
    params.recv_row_idx = handle.recv_row_idx.as<int32_t*>();
    return params;
}

inline CombineParams combine_of(const WorkspaceConfig& config, const HandleArg& handle, DType dtype, const CombineArg& arg) {
    CombineParams params{};
    params.dtype = dtype;
    params.layout = handle.layout();
    params.num_topk = config.num_topk;
    params.num_experts = config.num_experts;
    params.hidden = config.hidden;
    params.ranks_per_node = config.ranks_per_node > 0 ? config.ranks_per_node : config.num_ranks;
    params.recv_counts = handle.recv_counts.as<const int32_t*>();
    params.recv_row_idx = handle.recv_row_idx.as<const int32_t*>();
    params.x = arg.x.as<const std::byte*>();
    params.weights = arg.weights.as<const float*>();
    params.topk_weight_grads = arg.topk_weight_grads.as<const float*>();
    params.num_tokens = handle.topk_idx.num_rows;
    params.topk_idx = handle.topk_idx.as<const int32_t*>();
    params.bias = arg.bias.as<const std::byte*>();
    params.combined_x = arg.combined_x.as<std::byte*>();
    params.combined_topk_weight_grads = arg.combined_topk_weight_grads.as<float*>();
    params.options = arg.options;
    return params;
}

// Returns the signature of a cached dispatch or a combine.
inline Signature signature_along(const HandleArg& handle, Operation operation, DType dtype) {
    return {operation, dtype, handle.layout(), 1, handle.number(), 0, 0, 0};
}

}  // namespace deepep_moe

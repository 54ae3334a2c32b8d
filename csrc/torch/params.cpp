// Fills in the parameters of a buffer's calls on GPUs from tensors and handles.
#include "torch/calls.h"

namespace deepep_moe {
namespace {

int64_t row_bytes_of(const Tensor& rows) { return rows.defined() ? rows.size(-1) * static_cast<int64_t>(rows.element_size()) : 0; }

// Views `lanes` rows as one.
Tensor widened(const Tensor& tensor, int64_t lanes) { return lanes > 1 ? tensor.view({-1, lanes}) : tensor; }

// Returns the plan of a cached dispatch or a combine.
GpuPlanParams cached_plan(const Handle& handle) {
    GpuPlanParams plan{};  // the exchange fills in the scratch of its routing
    static_cast<GpuTopkIdx&>(plan.routing) = handle.experts_at(kTopkIdx, handle.shape.num_tokens);
    plan.cached = true;
    plan.recv_counts = handle.at(kRecvCounts);
    plan.is_expert_layout = handle.is_expert_layout;
    plan.expert_alignment = 1;
    plan.num_recv_rows_bound = -1;
    return plan;
}

GpuPlanParams fresh_plan(const Handle& handle, const Tensor& topk_idx, int64_t num_recv_rows) {
    GpuPlanParams plan{};
    static_cast<GpuTopkIdx&>(plan.routing) = {data_of<const void>(topk_idx), topk_idx.stride(0), topk_idx.stride(1),
                                              topk_idx.scalar_type() == at::kLong, static_cast<int>(topk_idx.size(0))};
    plan.routing.narrow_topk_idx = handle.at(kTopkIdx);
    plan.reports_counts = num_recv_rows < 0;
    plan.is_expert_layout = handle.is_expert_layout;
    plan.expert_alignment = static_cast<int>(handle.expert_alignment);
    plan.num_recv_rows_bound = num_recv_rows;
    plan.recv_counts = handle.at(kRecvCounts);
    plan.num_recv_tokens_per_expert = handle.at(kTokensPerExpert);
    return plan;
}

// If the handle has several nodes, limit the plan to the tokens in this node, and return the part of the call that crosses.
RailCall split_off_rail(const Handle& handle, GpuPlanParams& plan) {
    RailCall rail;
    if (handle.shape.num_node_tokens == 0) return rail;
    rail.meet.cached = plan.cached;
    rail.meet.topk = plan.routing;
    rail.meet.narrow_topk_idx = plan.routing.narrow_topk_idx;
    plan.routing = {handle.experts_at(kNodeTopkIdx, handle.shape.num_node_tokens)};
    rail.meet.node_topk_idx = handle.at(kNodeTopkIdx);
    rail.meet.in_counts = handle.at(kInCounts), rail.move.in_counts = rail.meet.in_counts;
    return rail;
}

GpuDispatchCall dispatch_along(const GpuPlanParams& plan, const Handle& handle, const Outgoing& sent, int64_t lanes) {
    GpuDispatchCall call{.plan = plan};
    call.rail = split_off_rail(handle, call.plan);
    GpuDispatchParams& params = call.params;
    const bool has_weights = sent.topk_weights.defined();
    params.routing = call.plan.routing;
    params.routing.narrow_topk_idx = nullptr;
    params.cached = plan.cached;
    params.has_lanes = !plan.cached || has_weights;
    params.is_expert_layout = handle.is_expert_layout;
    params.expert_alignment = static_cast<int>(handle.expert_alignment);
    params.row_bytes = row_bytes_of(sent.x);
    params.scale_bytes = row_bytes_of(sent.x_scales);
    params.num_x_rows = static_cast<int>(sent.x.size(0));
    params.x = data_of<const std::byte>(sent.x);
    params.x_scales = data_of<const std::byte>(sent.x_scales);
    if (has_weights) {
        const Tensor weights = widened(sent.topk_weights, lanes);
        params.topk_weights = {data_of<const float>(weights), weights.stride(0), weights.stride(1)};
    }
    params.recv_counts = handle.at(kRecvCounts);
    params.num_recv_tokens_per_expert = handle.at(kTokensPerExpert);
    params.recv_row_idx = handle.at(kRecvRowIdx);
    call.rail.meet.has_weights = has_weights;
    call.rail.meet.topk_weights = params.topk_weights;
    call.rail.move.row_bytes = params.row_bytes, call.rail.move.tail_bytes = params.scale_bytes;
    call.rail.move.x = params.x, call.rail.move.x_scales = params.x_scales;
    call.signature = {.operation = Operation::kDispatch,
                      .dtype = dtype_of(sent.x.scalar_type()),
                      .layout = handle.layout(),
                      .expert_alignment = plan.expert_alignment,
                      .has_weights = has_weights,
                      .has_scales = sent.x_scales.defined()};
    return call;
}

}  // namespace

GpuDispatchCall Calls::dispatch_call(const Handle& handle, const Outgoing& sent, int64_t num_recv_rows) const {
    return dispatch_along(fresh_plan(handle, widened(sent.topk_idx, lanes()), num_recv_rows), handle, sent, lanes());
}

GpuDispatchCall Calls::cached_dispatch_call(const Handle& handle, const Outgoing& sent) const {
    GpuDispatchCall call = dispatch_along(cached_plan(handle), handle, sent, lanes());
    call.numbers = handle.call.const_data_ptr<int64_t>();
    call.signature.operation = Operation::kCachedDispatch;
    call.signature.handle_call = handle.number();
    return call;
}

// Allocates the outputs of a dispatch. GpuDispatchParams says what is_guess means.
void Calls::receive_into(Received& rows, const Outgoing& sent, GpuDispatchCall& call, int64_t num_rows, bool is_guess,
                         bool is_bounded) const {
    GpuDispatchParams& params = call.params;
    rows.x = empty({num_rows, settings.hidden}, sent.x.scalar_type());
    if (sent.x_scales.defined()) rows.x_scales = empty({num_rows, sent.x_scales.size(1)}, at::kFloat);
    if (sent.topk_weights.defined())
        rows.topk_weights = params.is_expert_layout ? empty({num_rows}, at::kFloat) : empty({num_rows, settings.num_topk}, at::kFloat);
    Tensor topk_idx;
    if (!params.is_expert_layout && sent.topk_idx.defined()) {
        const c10::InferenceMode counts_changes(false);  // a part of the handle, as in `dispatch`
        topk_idx = rows.handle->recv_topk_idx = empty({num_rows, settings.num_topk}, sent.topk_idx.scalar_type());
        if (is_bounded) topk_idx.fill_(-1);  // rows behind the last
    }
    params.num_rows = num_rows;
    params.recv_x = data_of<std::byte>(rows.x);
    params.recv_x_scales = data_of<std::byte>(rows.x_scales);
    params.recv_topk_idx = data_of<void>(topk_idx);
    params.recv_topk_idx_is_int64 = topk_idx.defined() && topk_idx.scalar_type() == at::kLong;
    params.recv_topk_weights = data_of<float>(rows.topk_weights);
    params.is_guess = is_guess;
}

GpuCombineCall Calls::combine_call(const Handle& handle, const Tensor& x, const ExpertRows* expert_rows, const CombineInputs& inputs,
                                   const Combined& combined) const {
    const bool are_sent = settings.is_by_lane && can_fuse() && inputs.weights.defined();  // the weights, beside their rows
    const Tensor& beside = are_sent ? inputs.weights : inputs.topk_weight_grads;
    const Tensor weights = are_sent || inputs.source_weights.defined() ? Tensor() : inputs.weights;
    const int64_t num_topk = handle.shape.num_topk * handle.shape.lanes;
    GpuCombineCall call{.plan = cached_plan(handle)};
    call.rail = split_off_rail(handle, call.plan);
    call.numbers = handle.call.const_data_ptr<int64_t>();
    GpuCombineParams& params = call.params;
    params.routing = call.plan.routing;
    params.is_expert_layout = handle.is_expert_layout;
    params.has_topk_weight_grads = beside.defined();
    params.dtype = dtype_of(x.scalar_type());
    params.num_rows = handle.num_rows;
    params.recv_counts = handle.at(kRecvCounts);
    params.recv_row_idx = handle.at(kRecvRowIdx);
    params.x = data_of<const std::byte>(x);
    if (expert_rows != nullptr) params.expert_rows = *expert_rows;
    params.weights = data_of<const float>(weights);
    params.bias = data_of<const std::byte>(inputs.bias);
    params.topk_weight_grads = data_of<const float>(beside);
    params.tokens_per_row = combined.x.size(0) == 0 ? 1 : static_cast<int>(inputs.tokens_per_row);
    params.source_weights = data_of<const float>(inputs.source_weights);
    params.combined_x = data_of<std::byte>(combined.x);
    params.combined_topk_weight_grads = data_of<float>(combined.topk_weight_grads);
    params.options = inputs.options;
    params.is_fused = settings.is_fused, params.weights_are_sent = are_sent;
    const bool are_single = !handle.is_expert_layout || (num_topk == 1 && expert_rows == nullptr);
    params.direct = are_single && !weights.defined() && is_aligned(beside);
    params.context.config.num_topk = static_cast<int>(num_topk);  // for `tail_bytes`
    call.rail.move.is_combine = true;
    call.rail.move.row_bytes = row_bytes_of(x), call.rail.move.tail_bytes = params.tail_bytes();
    call.signature = {.operation = Operation::kCombine,
                      .dtype = params.dtype,
                      .layout = handle.layout(),
                      .handle_call = handle.number(),
                      .has_topk_weight_grads = beside.defined()};
    return call;
}

}  // namespace deepep_moe

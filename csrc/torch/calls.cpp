#include "torch/calls.h"

namespace deepep_moe {
namespace {

MatrixArg matrix_of(const Tensor& tensor) {
    MatrixArg arg{arg_of(tensor)};
    if (tensor.defined()) arg.row_stride = tensor.stride(0), arg.column_stride = tensor.stride(1);
    return arg;
}

bool is_fp8(at::ScalarType type) { return type == at::kFloat8_e4m3fn || type == at::kFloat8_e5m2; }

}  // namespace

Calls::Calls(py::object shim, const Settings& settings, at::Device device, py::object shape_of, py::object current_stream, py::object tell)
    : settings(settings),
      shim_(std::move(shim)),
      make_shape_(std::move(shape_of)),
      current_stream_(std::move(current_stream)),
      tell_(std::move(tell)),
      exchange_(shim_in<ExchangeShim>(shim_.attr("capsule")(), kShimName)),
      device_(device) {}

void Calls::release() {
    exchange_ = nullptr;
    shim_ = make_shape_ = current_stream_ = tell_ = py::none();
}

CallMode Calls::mode(int num_sms) const { return {num_sms == -1 ? settings.num_sms : num_sms, false, current_stream_().cast<uintptr_t>()}; }

// ---- handles ----

py::object Calls::shape_of(int64_t num_tokens, bool is_expert_layout) const {
    return make_shape_(num_tokens, is_expert_layout ? "expert" : "rank");
}

const std::array<int64_t, 5>& Calls::starts_of(int64_t num_tokens, bool is_expert_layout) {
    std::array<int64_t, 5>& starts = starts_[is_expert_layout];
    if (num_tokens_[is_expert_layout] == num_tokens) return starts;  // mostly those of the call before
    const py::tuple made = shape_of(num_tokens, is_expert_layout).attr("starts");
    for (size_t i = 0; i < starts.size(); ++i) starts[i] = made[i].cast<int64_t>();
    num_tokens_[is_expert_layout] = num_tokens;
    return starts;
}

HandleArg Calls::handle_arg(const Dispatched& handle) const {
    HandleArg arg;
    arg.call = handle.call.const_data_ptr<int64_t>();
    arg.is_expert_layout = handle.is_expert_layout;
    arg.expert_alignment = static_cast<int>(handle.expert_alignment);
    arg.num_rows = handle.num_rows;
    const auto sections = std::span(handle.starts).first(handle.starts.size() - 1);
    arg.unpack(reinterpret_cast<uintptr_t>(handle.memory.const_data_ptr()), sections, handle.num_tokens, settings.num_topk, 0);
    return arg;
}

const int64_t* Calls::counts_of(const Dispatched& handle) const {
    return handle.call.const_data_ptr<int64_t>() + handle.call.numel() - settings.num_local_experts;
}

Tensor Calls::tokens_per_expert(const Dispatched& handle) const {
    return handle.memory.as_strided({settings.num_local_experts}, {1}, handle.starts[3]);
}

// ---- what calls take ----

// [num_rows, hidden] that a kernel can move, with scales where they are fp8.
bool Calls::are_rows(const Tensor& x, const Tensor& scales) const {
    const int64_t hidden = settings.hidden;
    if (!is_here(x) || x.dim() != 2 || x.size(1) != hidden || !x.is_contiguous()) return false;
    if (hidden * x.element_size() % kRowAlignment != 0 || !is_aligned(x)) return false;
    if (!is_fp8(x.scalar_type())) return can_be_summed(x.scalar_type()) && !scales.defined();
    return is_here(scales) && scales.scalar_type() == at::kFloat && scales.is_contiguous() && is_aligned(scales) && scales.dim() == 2 &&
           scales.size(0) == x.size(0) && scales.size(1) == (hidden + kScaleBlock - 1) / kScaleBlock;
}

bool Calls::takes(const Outgoing& out) const {
    const Tensor &idx = out.topk_idx, &weights = out.topk_weights;
    if (out.tokens_per_row < 1 || !is_here(idx) || idx.dim() != 2 || !are_rows(out.x, out.x_scales)) return false;
    const int64_t num_tokens = out.x.size(0) * out.tokens_per_row;
    if (num_tokens > settings.num_max_tokens) return false;
    if (out.tokens_per_row > 1 && (settings.num_topk != 1 || out.tokens_per_row > kMaxTopk)) return false;
    if (idx.size(0) != num_tokens || idx.size(1) != settings.num_topk) return false;
    if (idx.scalar_type() != at::kLong && idx.scalar_type() != at::kInt) return false;
    return !weights.defined() ||
           (is_here(weights) && weights.scalar_type() == at::kFloat && weights.dim() == 2 && weights.numel() == idx.numel());
}

bool Calls::takes_along(const Dispatched& handle, const Outgoing& out) const {
    const Tensor& weights = out.topk_weights;
    if (!are_rows(out.x, out.x_scales) || out.x.size(0) != handle.num_tokens) return false;
    return !weights.defined() || (is_here(weights) && weights.scalar_type() == at::kFloat &&
                                  weights.sizes() == at::IntArrayRef({handle.num_tokens, settings.num_topk}));
}

bool Calls::takes_rows(const Dispatched& handle, const Tensor& x) const {
    return x.defined() && x.dim() == 2 && x.size(0) == handle.num_rows && can_be_summed(x.scalar_type()) && are_rows(x, Tensor());
}

bool Calls::takes_inputs(const Dispatched& handle, const Tensor& x, const CombineInputs& inputs) const {
    const auto is_like = [&](const Tensor& tensor, at::ScalarType type, at::IntArrayRef sizes) {
        return is_here(tensor) && tensor.scalar_type() == type && tensor.is_contiguous() && tensor.sizes() == sizes;
    };
    const Tensor &weights = inputs.weights, &source_weights = inputs.source_weights, &bias = inputs.bias;
    if (weights.defined() && !is_like(weights, at::kFloat, {handle.num_rows})) return false;
    if (bias.defined() && !(is_like(bias, x.scalar_type(), {handle.num_tokens, settings.hidden}) && is_aligned(bias))) return false;
    if (inputs.topk_weight_grads.defined()) {
        const bool is_like_rows = handle.is_expert_layout
                                      ? is_like(inputs.topk_weight_grads, at::kFloat, {handle.num_rows})
                                      : is_like(inputs.topk_weight_grads, at::kFloat, {handle.num_rows, settings.num_topk});
        if (!is_like_rows) return false;
    }
    if (!source_weights.defined()) return true;
    const int64_t shared = source_weights.dim() == 2 ? source_weights.size(0) : 0;
    const bool are_shared =
        weights.defined() && settings.num_topk == 1 && shared > 0 && shared <= kMaxTopk && handle.num_tokens % shared == 0;
    return are_shared && is_like(source_weights, at::kFloat, {shared, handle.num_tokens / shared});
}

std::optional<ExpertRowsArg> Calls::expert_rows_of(at::TensorList tensors, const Dispatched& handle) const {
    if (static_cast<int64_t>(tensors.size()) != settings.num_local_experts || tensors.size() > kMaxExpertTensors || !tensors[0].defined() ||
        !can_be_summed(tensors[0].scalar_type()))
        return std::nullopt;
    TensorArg args[kMaxExpertTensors];
    for (size_t i = 0; i < tensors.size(); ++i) {
        const Tensor& tensor = tensors[i];
        if (!is_here(tensor) || tensor.scalar_type() != tensors[0].scalar_type() || !tensor.is_contiguous()) return std::nullopt;
        args[i] = arg_of(tensor);
    }
    return deepep_moe::expert_rows_of({args, tensors.size()}, counts_of(handle), settings.hidden, handle.num_rows);
}

RowScaling Calls::scaling(const Tensor& weights, const Tensor& x, const ExpertRowsArg* expert_rows, const Tensor& grad_weights) {
    return scaling_of(arg_of(weights), arg_of(x), expert_rows, arg_of(grad_weights), dtype_of(x.scalar_type()));
}

// ---- calls ----

Incoming Calls::receive_buffers(const Outgoing& out, GpuDispatchCall& call, int64_t num_rows, bool is_guess, bool is_bounded) const {
    const bool is_expert_layout = call.params.is_expert_layout;
    Incoming in;
    in.x = empty({num_rows, settings.hidden}, out.x.scalar_type());
    if (out.x_scales.defined()) in.x_scales = empty({num_rows, out.x_scales.size(1)}, at::kFloat);
    if (out.topk_weights.defined())
        in.topk_weights = is_expert_layout ? empty({num_rows}, at::kFloat) : empty({num_rows, settings.num_topk}, at::kFloat);
    if (!is_expert_layout && out.topk_idx.defined()) {
        const c10::InferenceMode counts_changes(false);  // a part of the handle, as in `dispatch`
        in.topk_idx = empty({num_rows, settings.num_topk}, out.topk_idx.scalar_type());
        if (is_bounded) in.topk_idx.fill_(-1);  // rows behind the last
    }
    call.receive_into(arg_of(in.x), arg_of(in.x_scales), arg_of(in.topk_idx), arg_of(in.topk_weights), is_guess);
    return in;
}

Dispatched Calls::dispatch(const Outgoing& out, Incoming& in, bool is_expert_layout, int64_t expert_alignment, int64_t num_recv_rows,
                           int num_sms) {
    Dispatched made;
    made.num_tokens = out.topk_idx.size(0);
    made.starts = starts_of(made.num_tokens, is_expert_layout);
    {
        const c10::InferenceMode counts_changes(false);  // in which PyTorch counts changes in place
        made.memory = empty({made.starts.back()}, at::kInt);
        made.call = at::empty({1 + 2 * settings.num_ranks + settings.num_local_experts}, at::kLong);
    }
    made.is_expert_layout = is_expert_layout;
    made.expert_alignment = expert_alignment;
    GpuDispatchCall call(handle_arg(made), arg_of(out.x), arg_of(out.x_scales), matrix_of(out.topk_idx), matrix_of(out.topk_weights),
                         dtype_of(out.x.scalar_type()), num_recv_rows);
    // Called from the other module, without the GIL: what fails is kept, and thrown once that has returned.
    struct Allocation {
        std::function<void(int64_t, bool)> make;
        std::exception_ptr failure;
    } allocation{[&](int64_t num_rows, bool is_guess) { in = receive_buffers(out, call, num_rows, is_guess, num_recv_rows >= 0); }, {}};
    const auto allocate = [](void* context, int64_t num_rows, bool is_guess) noexcept {
        auto& allocation = *static_cast<Allocation*>(context);
        try {
            allocation.make(num_rows, is_guess);
            return true;
        } catch (...) {
            allocation.failure = std::current_exception();
            return false;
        }
    };
    const CallMode how = mode(num_sms);
    int64_t* const numbers = made.call.mutable_data_ptr<int64_t>();
    call_unlocked(shim_, *exchange_, [&](ExchangeShim& exchange) {
        made.num_rows = exchange.dispatch(call, how, numbers, allocate, &allocation);
        return made.num_rows >= 0 || allocation.failure;
    });
    if (allocation.failure) std::rethrow_exception(allocation.failure);
    if (made.num_rows < in.x.size(0)) {
        for (Tensor* tensor : {&in.x_scales, &in.topk_idx, &in.topk_weights})
            if (tensor->defined())
                tensor->resize_(tensor->dim() == 1 ? at::IntArrayRef({made.num_rows}) : at::IntArrayRef({made.num_rows, tensor->size(1)}));
        in.x.resize_({made.num_rows, settings.hidden});
    }
    return made;
}

Incoming Calls::dispatch_cached(const Dispatched& handle, const Outgoing& out, const RowScaling* scaling, int num_sms) {
    GpuDispatchCall call(handle_arg(handle), arg_of(out.x), arg_of(out.x_scales), {}, matrix_of(out.topk_weights),
                         dtype_of(out.x.scalar_type()), -1);
    Incoming in = receive_buffers(out, call, handle.num_rows, false, false);
    if (scaling != nullptr) call.params.scaling = *scaling;
    const CallMode how = mode(num_sms);
    call_unlocked(shim_, *exchange_, [&](ExchangeShim& exchange) { return exchange.dispatch_cached(call, how); });
    return in;
}

std::pair<Tensor, Tensor> Calls::combine(const Dispatched& handle, const Tensor& x, const ExpertRowsArg* expert_rows,
                                         const CombineInputs& inputs, int num_sms) {
    const Tensor combined_x = empty({handle.num_tokens / inputs.tokens_per_row, settings.hidden}, x.scalar_type());
    const Tensor combined_grads = inputs.topk_weight_grads.defined() ? empty({handle.num_tokens, settings.num_topk}, at::kFloat) : Tensor();
    const GpuCombineCall call(handle_arg(handle), arg_of(x), expert_rows,
                              arg_of(inputs.source_weights.defined() ? Tensor() : inputs.weights), arg_of(inputs.bias),
                              arg_of(inputs.topk_weight_grads), arg_of(inputs.source_weights), arg_of(combined_x), arg_of(combined_grads),
                              dtype_of(x.scalar_type()), inputs.sums_lanes);
    const CallMode how = mode(num_sms);
    call_unlocked(shim_, *exchange_, [&](ExchangeShim& exchange) { return exchange.combine(call, how); });
    return {combined_x, combined_grads};
}

// ---- failures ----

// The exception that is being handled, as Python's.
void Calls::raise_again(bool has_entered) {
    torch::translate_exception_to_python(std::current_exception());
    {
        py::error_scope kept;  // the error, until the peers have been told
        PyErr_NormalizeException(&kept.type, &kept.value, &kept.trace);
        try {
            tell_(py::handle(kept.value), has_entered);
        } catch (const py::error_already_set&) {  // the GPU has failed: the first error says why
        }
    }
    raise_python();
}

}  // namespace deepep_moe

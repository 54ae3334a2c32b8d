#include "torch/calls.h"

namespace deepep_moe {
namespace {

bool is_fp8(at::ScalarType type) { return type == at::kFloat8_e4m3fn || type == at::kFloat8_e5m2; }

}  // namespace

Calls::Calls(py::object owner, ExchangeShim& exchange, const Settings& settings, at::Device device, py::object tell)
    : settings(settings), owner_(std::move(owner)), tell_(std::move(tell)), exchange_(&exchange), device_(device), own_(device) {}

void Calls::release() {
    exchange_ = nullptr;
    owner_ = tell_ = py::none();
}

// ---- handles ----

HandleShape Calls::shape_of(int64_t num_tokens, bool is_expert_layout) const {
    constexpr int64_t kSection = 32;  // int32: each section has its own cache lines
    const int64_t num_topk = settings.num_topk, num_slots = is_expert_layout ? settings.num_ranks * settings.num_max_tokens : 0;
    HandleShape shape{num_tokens, num_topk, settings.num_node_tokens, lanes()};
    shape.sizes = {{{settings.num_local_experts, 0},
                    {settings.num_ranks, 1},
                    {num_slots, num_topk},
                    {settings.num_node_tokens, num_topk},
                    {settings.num_nodes > 1 ? settings.num_nodes : 0, 0},
                    {num_tokens, num_topk}}};
    int64_t end = 0;
    for (int i = 0; i < kNumHandleSections; ++i) {
        shape.starts[i] = (end + kSection - 1) / kSection * kSection;
        end = shape.starts[i] + shape.sizes[i][0] * std::max<int64_t>(1, shape.sizes[i][1]);
    }
    shape.starts.back() = end;
    return shape;
}

Handle Calls::handle_of(const Tensor& memory, const Tensor& call, int64_t num_tokens, bool is_expert_layout, int64_t expert_alignment,
                        int64_t num_rows) const {
    Handle handle;
    handle.buffer_id = settings.number;
    handle.expert_alignment = expert_alignment;
    handle.num_rows = num_rows;
    handle.is_expert_layout = is_expert_layout;
    handle.shape = shape_of(num_tokens, is_expert_layout);
    TORCH_CHECK(is_here(memory) && memory.is_contiguous() && memory.sizes() == at::IntArrayRef({handle.shape.starts.back()}) &&
                    call.numel() == num_handle_numbers(),
                "the handle's memory is not that of a dispatch of this buffer");
    return handle.with(memory, call);
}

// ---- what calls take ----

// Returns whether a kernel can move x [num_rows, hidden], with scales if it is fp8.
bool Calls::are_rows(const Tensor& x, const Tensor& scales) const {
    const int64_t hidden = settings.hidden;
    if (!is_here(x) || x.dim() != 2 || x.size(1) != hidden || !x.is_contiguous()) return false;
    if (hidden * x.element_size() % kRowAlignment != 0 || !is_aligned(x)) return false;
    if (!is_fp8(x.scalar_type())) return can_be_summed(x.scalar_type()) && !scales.defined();
    return has_form(device_, scales, at::kFloat, {x.size(0), (hidden + kScaleBlock - 1) / kScaleBlock}) && is_aligned(scales);
}

bool Calls::takes(const Outgoing& sent) const {
    const Tensor &idx = sent.topk_idx, &weights = sent.topk_weights;
    if (sent.tokens_per_row < 1 || !is_here(idx) || idx.dim() != 2 || !are_rows(sent.x, sent.x_scales)) return false;
    const int64_t num_tokens = sent.x.size(0) * sent.tokens_per_row * settings.lanes;
    if (num_tokens > settings.num_max_tokens || (settings.is_by_lane && !can_fuse())) return false;
    const bool may_share = can_fuse() && settings.num_topk == 1 && !settings.is_by_lane && sent.tokens_per_row <= kMaxTopk;
    if (sent.tokens_per_row > 1 && !may_share) return false;
    if (idx.size(0) != num_tokens || idx.size(1) != settings.num_topk) return false;
    if (!is_index(idx.scalar_type())) return false;
    return !weights.defined() ||
           (is_here(weights) && weights.scalar_type() == at::kFloat && weights.dim() == 2 && weights.numel() == idx.numel());
}

bool Calls::takes_along(const Handle& handle, const Outgoing& sent) const {
    const Tensor& weights = sent.topk_weights;
    if (!are_rows(sent.x, sent.x_scales) || sent.x.size(0) * settings.lanes != handle.shape.num_tokens) return false;
    if (settings.is_by_lane && !can_fuse()) return false;
    return !weights.defined() || (is_here(weights) && weights.scalar_type() == at::kFloat &&
                                  weights.sizes() == at::IntArrayRef({handle.shape.num_tokens, settings.num_topk}));
}

bool Calls::takes_rows(const Handle& handle, const Tensor& x) const {
    return x.defined() && x.dim() == 2 && x.size(0) == handle.num_rows && can_be_summed(x.scalar_type()) && are_rows(x, Tensor());
}

bool Calls::takes_inputs(const Handle& handle, const Tensor& x, const CombineInputs& inputs) const {
    const auto is_like = [&](const Tensor& tensor, at::ScalarType type, at::IntArrayRef sizes) {
        return has_form(device_, tensor, type, sizes);
    };
    const Tensor &weights = inputs.weights, &source_weights = inputs.source_weights, &bias = inputs.bias;
    if (settings.is_by_lane && (!can_fuse() || (weights.defined() && inputs.topk_weight_grads.defined()))) return false;
    if (weights.defined() && !is_like(weights, at::kFloat, {handle.num_rows})) return false;
    const int64_t num_sums = handle.shape.num_tokens / settings.lanes;
    if (bias.defined() && !(is_like(bias, x.scalar_type(), {num_sums, settings.hidden}) && is_aligned(bias))) return false;
    if (inputs.topk_weight_grads.defined()) {
        const bool is_like_rows = handle.is_expert_layout
                                      ? is_like(inputs.topk_weight_grads, at::kFloat, {handle.num_rows})
                                      : is_like(inputs.topk_weight_grads, at::kFloat, {handle.num_rows, settings.num_topk});
        if (!is_like_rows) return false;
    }
    if (!source_weights.defined()) return true;
    const int64_t shared = source_weights.dim() == 2 ? source_weights.size(0) : 0;
    const bool are_shared = weights.defined() && settings.num_topk == 1 && !settings.is_by_lane && shared > 0 && shared <= kMaxTopk &&
                            handle.shape.num_tokens % shared == 0;
    return are_shared && is_like(source_weights, at::kFloat, {shared, handle.shape.num_tokens / shared});
}

bool Calls::takes_handle(const Handle& handle) const {
    return handle.buffer_id == settings.number && handle.memory.defined() && handle.is_unchanged() && is_here(handle.memory) &&
           has_memory(handle.call);
}

std::optional<ExpertRows> Calls::expert_rows_of(at::TensorList tensors, const Handle& handle) const {
    if (!can_fuse() || static_cast<int64_t>(tensors.size()) != settings.num_local_experts || tensors.size() > kMaxExpertTensors ||
        !tensors[0].defined() || !can_be_summed(tensors[0].scalar_type()))
        return std::nullopt;
    ExpertRows expert_rows{static_cast<int>(tensors.size()), {}, {}};
    int64_t first_row = 0;
    for (size_t i = 0; i < tensors.size(); ++i) {
        const Tensor& part = tensors[i];
        if (!is_here(part) || part.scalar_type() != tensors[0].scalar_type() || !part.is_contiguous()) return std::nullopt;
        const TensorArg arg = arg_of(part);
        const bool has_shape = arg.num_dims == tensors[0].dim() && arg.num_columns == settings.hidden &&
                               arg.inner_rows == handle.counts_on_host()[i] && arg.num_leading == 1;
        if (!has_shape || arg.row_bytes() % kRowAlignment != 0 || arg.address % kRowAlignment != 0) return std::nullopt;
        expert_rows.first_row[i] = static_cast<int>(first_row);
        expert_rows.rows[i] = arg.address - first_row * arg.row_bytes();
        first_row += arg.num_rows;
    }
    return first_row == handle.num_rows ? std::optional(expert_rows) : std::nullopt;
}

bool Calls::can_join(at::TensorList tensors, const Handle& handle) const {
    if (static_cast<int64_t>(tensors.size()) != settings.num_local_experts) return false;
    const at::ArrayRef<int64_t> counts = handle.counts_on_host();
    for (size_t i = 0; i < tensors.size(); ++i) {
        const Tensor& tensor = tensors[i];
        if (!tensor.defined() || tensor.device() != device_ || tensor.scalar_type() != tensors[0].scalar_type()) return false;
        if (tensor.dim() == 0 || tensor.size(-1) != settings.hidden || tensor.numel() != counts[i] * settings.hidden) return false;
    }
    return true;
}

Tensor Calls::joined(at::TensorList tensors) const {
    variable_list rows;
    for (const Tensor& tensor : tensors)
        rows.push_back((tensor.layout() == at::kStrided ? tensor : tensor.to_dense()).reshape({-1, settings.hidden}));
    return at::cat(rows);
}

// ---- calls ----

CallMode Calls::begin(const Mode& how) {
    const uintptr_t stream = how.is_beside() ? own_.follow() : call_stream(device_);
    return {how.num_sms == -1 ? settings.num_sms : how.num_sms, how.is_split, stream, how.layer, how.is_late};
}

// A call may run on another stream than its dispatch, and the caller may drop the handle at once.
CallMode Calls::begin_along(const Handle& handle, const Mode& how) {
    const CallMode mode = begin(how);
    if (handle.stream && *handle.stream != (how.is_beside() ? call_stream(device_) : mode.stream))
        keep_for_current(device_, {handle.memory, handle.recv_topk_idx});
    return mode;
}

// Enqueues what the call does now. tensors: all of it, which whatever is left of it takes.
template <class Call>
void Calls::run(InFlight& in_flight, const Mode& how, const CallMode& mode, Call& call, variable_list& tensors,
                const std::function<bool(ExchangeShim&)>& enqueue) {
    try {
        call_unlocked(owner_, *exchange_, enqueue);
    } catch (...) {
        if (how.is_beside()) own_.keep(tensors);  // the stream goes on with the tensors that it was given
        throw;
    }
    if (how.is_beside()) in_flight.recorded = own_.record(std::move(tensors));
    if (how.is_split)
        half_ = in_flight.second_half =
            std::make_shared<SecondHalf>([self = weak_from_this(), call, tensors = std::move(tensors), first = mode.stream] {
                const std::shared_ptr<Calls> calls = self.lock();
                if (calls == nullptr || calls->is_released()) return false;
                const uintptr_t stream = call_stream(calls->device_);
                if (stream != first) keep_for_current(calls->device_, tensors);
                call_unlocked(calls->owner_, *calls->exchange_, [&](ExchangeShim& exchange) { return exchange.end(call, stream); });
                return true;
            });
}

// Gives outputs to a dispatch when their rows are known. Called from the other module, without the GIL: what fails is kept, and thrown once
// that has returned.
struct Allocation {
    std::function<void(int64_t num_rows, bool is_guess)> make;
    std::exception_ptr failure;

    static bool call(void* allocation, int64_t num_rows, bool is_guess) noexcept {
        auto& self = *static_cast<Allocation*>(allocation);
        try {
            self.make(num_rows, is_guess);
            return true;
        } catch (...) {
            self.failure = std::current_exception();
            return false;
        }
    }
};

Received Calls::dispatch(const Outgoing& sent, bool is_expert_layout, int64_t expert_alignment, int64_t num_recv_rows, const Mode& how) {
    count_late();
    Received received;
    received.handle = std::make_shared<Handle>();
    Handle& handle = *received.handle;
    handle.buffer_id = settings.number;
    handle.is_expert_layout = is_expert_layout;
    handle.expert_alignment = expert_alignment;
    handle.shape = shape_of(sent.topk_idx.size(0), is_expert_layout);
    {
        const c10::InferenceMode counts_changes(false);  // in which PyTorch counts changes in place
        handle.memory = empty({handle.shape.starts.back()}, at::kInt);
        handle.call = at::empty({num_handle_numbers()}, at::kLong);
    }
    GpuDispatchCall call = dispatch_call(handle, sent, num_recv_rows);
    Allocation allocation;
    allocation.make = [&](int64_t num_rows, bool is_guess) {
        receive_into(received, sent, call, num_rows, is_guess, num_recv_rows >= 0);
        if (how.is_beside()) own_.follow();  // so that it is after what had the memory before, and after the `fill_`
    };
    const CallMode mode = begin(how);
    int64_t* const numbers = handle.call.mutable_data_ptr<int64_t>();
    variable_list tensors{sent.x, sent.x_scales, sent.topk_idx, sent.topk_weights, handle.memory};
    const auto enqueue = [&](ExchangeShim& exchange) {
        handle.num_rows = exchange.dispatch(call, mode, numbers, &Allocation::call, &allocation);
        for (const Tensor& tensor : {received.x, received.x_scales, received.topk_weights, handle.recv_topk_idx}) tensors.push_back(tensor);
        return handle.num_rows >= 0 || allocation.failure;
    };
    run(received, how, mode, call, tensors, enqueue);
    if (allocation.failure) std::rethrow_exception(allocation.failure);
    if (how.is_late && num_recv_rows < 0 && handle.counts_on_host()[0] < 0) {
        handle.late = std::make_shared<Late>(Late{call, mode, sent});
        handle.is_unfit = std::make_shared<bool>(false);
        late_ = received.handle;
    }
    if (handle.num_rows < received.x.size(0)) {
        for (Tensor* tensor : {&received.x_scales, &handle.recv_topk_idx, &received.topk_weights})
            if (tensor->defined())
                tensor->resize_(tensor->dim() == 1 ? at::IntArrayRef({handle.num_rows})
                                                   : at::IntArrayRef({handle.num_rows, tensor->size(1)}));
        received.x.resize_({handle.num_rows, settings.hidden});
    }
    handle.stream = how.is_beside() ? call_stream(device_) : mode.stream;
    handle.seal();
    return received;
}

static void check_counted(const Handle& handle) {
    TORCH_CHECK(handle.late == nullptr || handle.late->received,
                "the counts of this dispatch are lost: this rank has failed or refused a call since; dispatch again");
}

void Calls::count_late() {
    const std::shared_ptr<Handle> handle = late_.lock();
    late_.reset();
    if (handle == nullptr || handle->late == nullptr) return;
    const std::shared_ptr<Late> kept = handle->late;
    Late& late = *kept;
    *handle->is_unfit = true;  // also if this fails
    if (!exchange_->can_count()) return;
    late.mode.stream = call_stream(device_);
    Received received;
    received.handle = handle;
    Allocation allocation;
    allocation.make = [&](int64_t num_rows, bool is_guess) { receive_into(received, late.sent, late.call, num_rows, is_guess, false); };
    int64_t num_rows = -1;
    int64_t* const numbers = handle->call.mutable_data_ptr<int64_t>();
    call_unlocked(owner_, *exchange_, [&](ExchangeShim& exchange) {
        num_rows = exchange.count_late(late.call, late.mode, numbers, &Allocation::call, &allocation);
        return num_rows >= 0 || allocation.failure;
    });
    if (allocation.failure) std::rethrow_exception(allocation.failure);
    if (num_rows <= handle->num_rows) {
        handle->late = nullptr;
        *handle->is_unfit = false;
        return;
    }
    handle->num_rows = num_rows;
    late.received = std::move(received);
}

Received Calls::take_late(const std::shared_ptr<Handle>& handle) {
    check_counted(*handle);
    return *std::move(std::exchange(handle->late, nullptr)->received);
}

Received Calls::dispatch_cached(const std::shared_ptr<Handle>& handle, const Outgoing& sent, const Scaling* scaling, const Mode& how) {
    count_late();
    check_counted(*handle);
    Received received;
    received.handle = handle;
    GpuDispatchCall call = cached_dispatch_call(*handle, sent);
    receive_into(received, sent, call, handle->num_rows, false, false);
    variable_list tensors{sent.x, sent.x_scales, sent.topk_weights, handle->memory, received.x, received.x_scales, received.topk_weights};
    if (scaling != nullptr) {
        received.grad_weights = at::empty_like(scaling->weights);
        call.params.scaling = {dtype_of(scaling->x.scalar_type()), data_of<const float>(scaling->weights),
                               data_of<const std::byte>(scaling->x), scaling->expert_rows == nullptr ? ExpertRows{} : *scaling->expert_rows,
                               data_of<float>(received.grad_weights)};
    }
    const CallMode mode = begin_along(*handle, how);
    run(received, how, mode, call, tensors, [&](ExchangeShim& exchange) { return exchange.dispatch_cached(call, mode); });
    return received;
}

Combined Calls::combine(const Handle& handle, const Tensor& x, const ExpertRows* expert_rows, const CombineInputs& inputs,
                        const Mode& how) {
    count_late();
    check_counted(handle);
    TORCH_CHECK(expert_rows != nullptr || x.size(0) == handle.num_rows, "the rows did not fit; ask Buffer.settle before the combine");
    Combined combined;
    combined.x = empty({handle.shape.num_tokens / (inputs.tokens_per_row * lanes()), settings.hidden}, x.scalar_type());
    if (inputs.topk_weight_grads.defined()) combined.topk_weight_grads = empty({handle.shape.num_tokens, settings.num_topk}, at::kFloat);
    const GpuCombineCall call = combine_call(handle, x, expert_rows, inputs, combined);
    variable_list tensors{x, inputs.weights, inputs.bias, inputs.topk_weight_grads, inputs.source_weights, handle.memory};
    tensors.insert(tensors.end(), {combined.x, combined.topk_weight_grads});
    const CallMode mode = begin_along(handle, how);
    run(combined, how, mode, call, tensors, [&](ExchangeShim& exchange) { return exchange.combine(call, mode); });
    return combined;
}

// ---- failures ----

// Raises the exception that is being handled as Python's.
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

#include "torch/functions.h"

#include <torch/csrc/autograd/engine.h>

namespace deepep_moe {

using torch::autograd::AutogradContext;

namespace {

// ---- rows by expert ----

// Returns [1, ..., num_rows, hidden] with `num_leading` leading ones.
Tensor rows_at(const Tensor& all, int64_t first_row, int64_t num_rows, int64_t num_leading) {
    std::vector<int64_t> sizes(num_leading + 2, 1);
    sizes[num_leading] = num_rows, sizes[num_leading + 1] = all.size(1);
    return part_of(all, first_row * all.size(1), sizes);
}

// Appends `all`, or the rows of each local expert.
void append_rows(variable_list& list, const Tensor& all, const Handle& handle, int64_t num_leading) {
    if (num_leading < 0) return list.push_back(all);
    int64_t first_row = 0;
    for (const int64_t count : handle.counts_on_host()) {
        list.push_back(rows_at(all, first_row, count, num_leading));
        first_row += count;
    }
}

// Returns the rows contiguous, on a boundary of kRowAlignment.
Tensor as_rows(const Tensor& grad) {
    const Tensor rows = grad.contiguous();
    return reinterpret_cast<uintptr_t>(rows.const_data_ptr()) % kRowAlignment == 0 ? rows : rows.clone();
}

// ---- what a backward keeps ----

struct Kept : torch::CustomClassHolder {
    std::weak_ptr<Calls> calls;
    Handle handle;  // has no tensors, because autograd saves them
    int64_t tokens_per_row, num_leading;
    bool has_weights, has_bias = false;
    std::vector<int64_t> weights_shape;

    Kept(Calls& calls, const Handle& handle, int64_t tokens_per_row, int64_t num_leading, bool has_weights)
        : calls(calls.weak_from_this()),
          handle(handle.with({}, {})),
          tokens_per_row(tokens_per_row),
          num_leading(num_leading),
          has_weights(has_weights) {}
};

void keep(AutogradContext* ctx, c10::intrusive_ptr<Kept> kept) { ctx->saved_data["kept"] = c10::IValue::make_capsule(std::move(kept)); }

const Kept& kept_in(AutogradContext* ctx) {
    const auto& held = ctx->saved_data["kept"];
    return *static_cast<const Kept*>(held.toCapsule().get());
}

// ---- gradients ----

// `call(calls)` by the buffer, if it can make it; an empty list where Python is to. The GIL is held.
template <class Call>
variable_list natively(const Kept& kept, const Call& call) {
    if (at::GradMode::is_enabled() || is_watched()) return {};
    const std::shared_ptr<Calls> calls = kept.calls.lock();
    if (calls == nullptr || !calls->can_begin()) return {};
    const at::AutoDispatchBelowADInplaceOrView below;
    calls->look_at_counts();
    return calls->or_tell([&] { return call(*calls); });
}

// Returns the gradients by a function of exchange/native.py: C++ declines those of higher order, under a transform, of tensors that kernels
// cannot read, and of a buffer that cannot begin a call.
template <class... Arguments>
variable_list in_python(const char* function, const Arguments&... arguments) {
    return tensors_of(py::module_::import("deepep_moe.exchange.native").attr(function)(arguments...));
}

// ---- a pass that fails ----

// Watches the backward pass that runs. PyTorch calls what is queued at the end of a pass, and only drops it where the pass fails.
struct PassWatch {
    const int64_t number, num_calls;
    bool is_over = false;

    explicit PassWatch(const Calls& calls) : number(calls.settings.number), num_calls(calls.num_calls()) {}
    PassWatch(const PassWatch&) = delete;
    ~PassWatch() {
        if (is_over || Py_IsInitialized() == 0) return;
        const py::gil_scoped_acquire gil;
        try {
            py::module_::import("deepep_moe.exchange.calls").attr("pass_failed")(number, num_calls);
        } catch (py::error_already_set& error) {
            error.discard_as_unraisable("deepep_moe");
        }
    }
};

// If the pass that runs fails before its next call of the buffer, the peers, which would wait for that, learn it.
void watch_pass(const Calls& calls) {
    if (torch::autograd::get_current_graph_task_id() < 0) return;  // somebody calls a node, and no pass runs
    auto watch = std::make_shared<PassWatch>(calls);
    torch::autograd::Engine::get_default_engine().queue_callback([watch = std::move(watch)] { watch->is_over = true; });
}

// ---- dispatch ----

// Returns recv_topk_weights, if weights are sent, then the rows.
variable_list run_dispatch(Calls& calls, const DispatchRequest& request, const Tensor& x, const Tensor& weights, Received& received) {
    Outgoing sent = request.sent;
    sent.x = x, sent.topk_weights = weights;
    received = calls.or_tell([&] {
        if (request.along == nullptr && weights.defined()) sent.topk_weights = weights.reshape(sent.topk_idx.sizes());  // lane by lane
        if (request.is_late) return calls.take_late(request.along);
        if (request.along != nullptr) return calls.dispatch_cached(request.along, sent, nullptr, request.mode);
        return calls.dispatch(sent, request.is_expert_layout, request.expert_alignment, request.num_recv_rows, request.mode);
    });
    variable_list outputs;
    if (weights.defined()) outputs.push_back(received.topk_weights);
    append_rows(outputs, received.x, *received.handle, request.num_leading);
    return outputs;
}

struct DispatchFunction : torch::autograd::Function<DispatchFunction> {
    static variable_list forward(AutogradContext* ctx, const Tensor& x, const std::optional<Tensor>& topk_weights, Calls* calls,
                                 const DispatchRequest* request, Received* received) {
        const at::AutoDispatchBelowADInplaceOrView below;
        variable_list outputs = run_dispatch(*calls, *request, x, topk_weights.value_or(Tensor()), *received);
        auto kept = c10::make_intrusive<Kept>(*calls, *received->handle, request->sent.tokens_per_row, request->num_leading,
                                              topk_weights.has_value());
        if (request->along != nullptr) kept->handle.is_unfit = nullptr;  // these rows are there
        if (topk_weights) kept->weights_shape = topk_weights->sizes().vec();
        keep(ctx, std::move(kept));
        ctx->save_for_backward({received->handle->memory, received->handle->call});
        return outputs;
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
        return with_errors([&] { return all_gradients(kept_in(ctx), ctx->get_saved_variables(), grads); });
    }

private:
    // Returns the gradients of all arguments of the forward.
    static variable_list all_gradients(const Kept& kept, const variable_list& saved, const variable_list& grads) {
        const Handle handle = kept.handle.with(saved[0], saved[1]);
        const Tensor grad_weights = kept.has_weights ? grads[0] : Tensor();
        const at::TensorList rows(grads.data() + kept.has_weights, grads.size() - kept.has_weights);
        variable_list input_grads = natively(kept, [&](Calls& calls) { return gradients(calls, handle, grad_weights, rows, kept); });
        if (input_grads.empty())
            input_grads = in_python("dispatch_gradients", handle, kept.tokens_per_row, grad_weights, rows.vec(), kept.num_leading >= 0);
        if (kept.has_weights) input_grads[1] = input_grads[1].view(kept.weights_shape);
        return {input_grads[0], input_grads[1], {}, {}, {}};
    }

    static variable_list gradients(Calls& calls, const Handle& handle, const Tensor& grad_weights, at::TensorList grads, const Kept& kept) {
        TORCH_CHECK(kept.handle.is_unfit == nullptr || !*kept.handle.is_unfit,
                    "the rows of this dispatch did not fit; use those that Buffer.settle returns");
        if (grad_weights.defined() && !calls.is_here(grad_weights)) return {};
        CombineInputs inputs;
        if (grad_weights.defined()) inputs.topk_weight_grads = grad_weights.contiguous();
        inputs.tokens_per_row = kept.tokens_per_row;
        Tensor rows = grads[0];
        std::optional<ExpertRows> expert_rows;
        if (kept.num_leading >= 0) {
            if (!calls.can_join(grads, handle)) return {};
            expert_rows = calls.expert_rows_of(grads, handle);
            if (!expert_rows) rows = calls.joined(grads);
        }
        if (!expert_rows) {
            if (!calls.is_here(rows)) return {};
            rows = as_rows(rows);
            if (!calls.takes_rows(handle, rows)) return {};
        }
        const Combined combined = calls.combine(handle, rows, expert_rows ? &*expert_rows : nullptr, inputs, {});
        return {combined.x, combined.topk_weight_grads};
    }
};

// ---- combine ----

// Returns combined_x, then topk_weight_grads, if they were given.
variable_list run_combine(Calls& calls, const Handle& handle, const CombineRequest& request, Combined& combined) {
    combined = calls.or_tell([&] { return calls.combine(handle, request.rows[0], request.expert_rows, request.inputs, request.mode); });
    variable_list outputs{combined.x};
    if (combined.topk_weight_grads.defined()) outputs.push_back(combined.topk_weight_grads);
    return outputs;
}

struct CombineFunction : torch::autograd::Function<CombineFunction> {
    static variable_list forward(AutogradContext* ctx, const std::optional<Tensor>& weights, const std::optional<Tensor>& bias,
                                 at::TensorList rows, Calls* calls, const Handle* handle, const CombineRequest* request,
                                 Combined* combined) {
        const at::AutoDispatchBelowADInplaceOrView below;
        variable_list outputs = run_combine(*calls, *handle, *request, *combined);
        const int64_t num_leading = request->expert_rows == nullptr ? -1 : rows[0].dim() - 2;
        auto kept = c10::make_intrusive<Kept>(*calls, *handle, request->inputs.tokens_per_row, num_leading, weights.has_value());
        kept->has_bias = bias.has_value();
        keep(ctx, std::move(kept));
        variable_list saved{handle->memory, handle->call};
        if (weights) {
            saved.push_back(*weights);
            saved.insert(saved.end(), rows.begin(), rows.end());
        }
        ctx->save_for_backward(std::move(saved));
        return outputs;
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
        return with_errors([&] {
            const Kept& kept = kept_in(ctx);
            variable_list input_grads = all_gradients(kept, ctx->get_saved_variables(), grads);
            input_grads.insert(input_grads.begin() + 1, kept.has_bias ? grads[0] : Tensor());
            input_grads.insert(input_grads.end(), 4, Tensor());
            return input_grads;
        });
    }

private:
    static variable_list all_gradients(const Kept& kept, const variable_list& saved, const variable_list& grads) {
        const Handle handle = kept.handle.with(saved[0], saved[1]);
        const at::TensorList scaled(saved.data() + 2, saved.size() - 2);
        variable_list input_grads = natively(kept, [&](Calls& calls) { return gradients(calls, handle, grads[0], scaled, kept); });
        if (input_grads.empty())
            input_grads = in_python("combine_gradients", handle, kept.tokens_per_row, kept.num_leading, grads[0], scaled.vec());
        return input_grads;
    }

    // Returns the gradients of the weights, then of the rows. scaled: the weights and the rows, or nothing.
    static variable_list gradients(Calls& calls, const Handle& handle, const Tensor& grad, at::TensorList scaled, const Kept& kept) {
        if (!calls.is_here(grad) || (!scaled.empty() && !calls.can_fuse())) return {};
        Outgoing sent;
        sent.x = as_rows(grad);
        std::optional<ExpertRows> expert_rows;
        Tensor x = scaled.empty() ? Tensor() : scaled[1];
        if (!scaled.empty()) {
            if (!calls.is_here(scaled[0]) || scaled[1].scalar_type() != sent.x.scalar_type()) return {};
            if (kept.num_leading >= 0) {
                expert_rows = calls.expert_rows_of(scaled.slice(1), handle);
                if (!expert_rows) x = calls.joined(scaled.slice(1));
            }
            if (!expert_rows && !calls.takes_rows(handle, x)) return {};
        }
        const Scaling scaling = scaled.empty() ? Scaling{} : Scaling{scaled[0], x, expert_rows ? &*expert_rows : nullptr};
        const auto along = std::make_shared<Handle>(handle);
        const Received received = calls.dispatch_cached(along, sent, scaled.empty() ? nullptr : &scaling, {});
        watch_pass(calls);
        variable_list input_grads{received.grad_weights};
        append_rows(input_grads, received.x, handle, kept.num_leading);
        return input_grads;
    }
};

}  // namespace

Received dispatch(Calls& calls, const DispatchRequest& request) {
    Received received;
    const Tensor &x = request.sent.x, &weights = request.sent.topk_weights;
    variable_list outputs = needs_gradients({&x, &weights}) ? DispatchFunction::apply(x, optional_of(weights), &calls, &request, &received)
                                                            : run_dispatch(calls, request, x, weights, received);
    if (request.along == nullptr && received.handle->late != nullptr)
        received.handle->late->sent = request.sent;  // with the caller's gradients
    const size_t first = weights.defined();
    if (weights.defined()) received.topk_weights = outputs[0];
    if (request.num_leading < 0)
        received.x = outputs[first];
    else
        received.parts.assign(outputs.begin() + first, outputs.end());
    return received;
}

Combined combine(Calls& calls, const Handle& handle, const CombineRequest& request) {
    Combined combined;
    const CombineInputs& inputs = request.inputs;
    const bool rows_need = at::GradMode::is_enabled() &&
                           std::any_of(request.rows.begin(), request.rows.end(), [](const Tensor& t) { return t.requires_grad(); });
    if (!rows_need && !needs_gradients({&inputs.weights, &inputs.bias})) {
        run_combine(calls, handle, request, combined);
        return combined;
    }
    combined.x = CombineFunction::apply(optional_of(inputs.weights), optional_of(inputs.bias), at::TensorList(request.rows), &calls,
                                        &handle, &request, &combined)[0];
    return combined;
}

}  // namespace deepep_moe

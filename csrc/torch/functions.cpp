#include "torch/functions.h"

#include <torch/csrc/autograd/engine.h>

namespace deepep_moe {

using torch::autograd::AutogradContext;

Hooks& hooks() {
    static Hooks* const made = new Hooks;  // never destroyed: Python may be gone by then
    return *made;
}

namespace {

// ---- rows by expert ----

// [1, ..., num_rows, hidden] with `num_leading` leading ones: a slice of `all`'s storage that is not registered as a view, so autograd
// treats each expert's rows as a tensor of its own.
Tensor rows_at(const Tensor& all, int64_t first_row, int64_t num_rows, int64_t num_leading) {
    auto part = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(all.storage()), all.key_set(), all.dtype());
    std::vector<int64_t> sizes(num_leading + 2, 1);
    sizes[num_leading] = num_rows, sizes[num_leading + 1] = all.size(1);
    part.unsafeGetTensorImpl()->set_storage_offset(all.storage_offset() + first_row * all.size(1));
    part.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
    return part;
}

// Appends `all`, or the rows of each local expert.
void append_rows(variable_list& list, const Tensor& all, const Calls& calls, const Dispatched& handle, int64_t num_leading) {
    if (num_leading < 0) return list.push_back(all);
    const int64_t* counts = calls.counts_of(handle);
    int64_t first_row = 0;
    for (int64_t expert = 0; expert < calls.settings.num_local_experts; first_row += counts[expert++])
        list.push_back(rows_at(all, first_row, counts[expert], num_leading));
}

// Contiguous, on a boundary of kRowAlignment.
Tensor as_rows(const Tensor& grad) {
    const Tensor rows = grad.contiguous();
    return reinterpret_cast<uintptr_t>(rows.const_data_ptr()) % kRowAlignment == 0 ? rows : rows.clone();
}

// ---- what a backward keeps ----

enum Kept {
    kNumber,
    kNumRows,
    kNumTokens,
    kTokensPerRow,
    kLeading,
    kHasWeights,
    kIsExpertLayout,
    kAlignment,
    kStarts,
    kNumKept = kStarts + 5
};

std::vector<int64_t> kept_of(const Calls& calls, const Dispatched& handle, int64_t tokens_per_row, int64_t num_leading, bool has_weights) {
    std::vector<int64_t> kept{calls.settings.number, handle.num_rows, handle.num_tokens,       tokens_per_row,
                              num_leading,           has_weights,     handle.is_expert_layout, handle.expert_alignment};
    kept.insert(kept.end(), handle.starts.begin(), handle.starts.end());
    return kept;
}

Dispatched dispatched_of(const std::vector<int64_t>& kept, const variable_list& saved) {
    Dispatched handle{saved[0], saved[1], kept[kNumRows], kept[kNumTokens], {}, kept[kIsExpertLayout] != 0, kept[kAlignment]};
    std::copy_n(kept.begin() + kStarts, handle.starts.size(), handle.starts.begin());
    return handle;
}

// As Python makes a handle of it: number, layout, alignment, rows, tokens, memory, call.
py::tuple handle_of(const std::vector<int64_t>& kept, const variable_list& saved) {
    return py::make_tuple(kept[kNumber], kept[kIsExpertLayout] != 0 ? "expert" : "rank", kept[kAlignment], kept[kNumRows], kept[kNumTokens],
                          saved[0], saved[1]);
}

// ---- gradients ----

// `call(calls)` by the buffer of that number, if it can make it; an empty list where Python is to. The GIL is held.
template <class Call>
variable_list natively(int64_t number, const Call& call) {
    if (at::GradMode::is_enabled() || is_watched()) return {};
    const py::object found = hooks().plain(number);
    if (found.is_none()) return {};
    auto& calls = found.cast<Calls&>();
    const at::AutoDispatchBelowADInplaceOrView below;
    return calls.is_ready() ? calls.or_tell([&] { return call(calls); }) : variable_list{};
}

// ---- a pass that fails ----

// Of the backward pass that runs. PyTorch calls what is queued at the end of a pass, and only drops it where the pass fails.
struct PassWatch {
    const int64_t number, num_calls;
    bool is_over = false;

    explicit PassWatch(const Calls& calls) : number(calls.settings.number), num_calls(calls.num_calls()) {}
    PassWatch(const PassWatch&) = delete;
    ~PassWatch() {
        if (is_over || Py_IsInitialized() == 0) return;
        const py::gil_scoped_acquire gil;
        try {
            hooks().pass_failed(number, num_calls);
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

// Outputs: recv_topk_weights, if weights are sent, then the rows.
variable_list run_dispatch(Calls& calls, const DispatchRequest& request, const Tensor& x, const Tensor& weights, DispatchResult& result) {
    Outgoing out = request.out;
    out.x = x, out.topk_weights = weights;
    calls.or_tell([&] {
        if (request.along != nullptr) {
            result.handle = *request.along;
            result.in = calls.dispatch_cached(*request.along, out, nullptr, request.num_sms);
            return 0;
        }
        if (weights.defined()) out.topk_weights = weights.reshape(out.topk_idx.sizes());  // lane by lane
        result.handle =
            calls.dispatch(out, result.in, request.is_expert_layout, request.expert_alignment, request.num_recv_rows, request.num_sms);
        return 0;
    });
    variable_list outputs;
    if (weights.defined()) outputs.push_back(result.in.topk_weights);
    append_rows(outputs, result.in.x, calls, result.handle, request.num_leading);
    return outputs;
}

struct DispatchFunction : torch::autograd::Function<DispatchFunction> {
    static variable_list forward(AutogradContext* ctx, const Tensor& x, const std::optional<Tensor>& topk_weights, Calls* calls,
                                 const DispatchRequest* request, DispatchResult* result) {
        const at::AutoDispatchBelowADInplaceOrView below;
        variable_list outputs = run_dispatch(*calls, *request, x, topk_weights.value_or(Tensor()), *result);
        auto kept = kept_of(*calls, result->handle, request->out.tokens_per_row, request->num_leading, topk_weights.has_value());
        if (topk_weights) kept.insert(kept.end(), topk_weights->sizes().begin(), topk_weights->sizes().end());
        ctx->saved_data["kept"] = std::move(kept);
        ctx->save_for_backward({result->handle.memory, result->handle.call});
        return outputs;
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
        return with_errors([&] { return all_gradients(ctx->saved_data["kept"].toIntVector(), ctx->get_saved_variables(), grads); });
    }

private:
    // Of all arguments of the forward.
    static variable_list all_gradients(const std::vector<int64_t>& kept, const variable_list& saved, const variable_list& grads) {
        const bool has_weights = kept[kHasWeights] != 0;
        const std::vector<int64_t> weights_shape(kept.begin() + kNumKept, kept.end());
        const Tensor grad_weights = has_weights ? grads[0] : Tensor();
        const at::TensorList rows(grads.data() + has_weights, grads.size() - has_weights);
        variable_list made =
            natively(kept[kNumber], [&](Calls& calls) { return gradients(calls, dispatched_of(kept, saved), grad_weights, rows, kept); });
        if (made.empty())
            made = tensors_of(hooks().dispatch_gradients(handle_of(kept, saved), kept[kTokensPerRow], packed(grad_weights),
                                                         py::cast(rows.vec()), kept[kLeading] >= 0));
        if (has_weights) made[1] = made[1].view(weights_shape);
        return {made[0], made[1], {}, {}, {}};
    }

    static variable_list gradients(Calls& calls, const Dispatched& handle, const Tensor& grad_weights, at::TensorList grads,
                                   const std::vector<int64_t>& kept) {
        if (grad_weights.defined() && !calls.is_here(grad_weights)) return {};
        CombineInputs inputs;
        if (grad_weights.defined()) inputs.topk_weight_grads = grad_weights.contiguous();
        inputs.tokens_per_row = kept[kTokensPerRow];
        if (kept[kLeading] >= 0) {
            const auto expert_rows = calls.expert_rows_of(grads, handle);
            if (!expert_rows) return {};
            const auto [grad_x, combined] = calls.combine(handle, grads[0], &*expert_rows, inputs, -1);
            return {grad_x, combined};
        }
        if (!calls.is_here(grads[0])) return {};
        const Tensor rows = as_rows(grads[0]);
        if (!calls.takes_rows(handle, rows)) return {};
        const auto [grad_x, combined] = calls.combine(handle, rows, nullptr, inputs, -1);
        return {grad_x, combined};
    }
};

// ---- combine ----

Tensor run_combine(Calls& calls, const Dispatched& handle, const CombineRequest& request) {
    return calls.or_tell(
        [&] { return calls.combine(handle, request.rows[0], request.expert_rows, request.inputs, request.num_sms).first; });
}

struct CombineFunction : torch::autograd::Function<CombineFunction> {
    static Tensor forward(AutogradContext* ctx, const std::optional<Tensor>& weights, const std::optional<Tensor>& bias,
                          at::TensorList rows, Calls* calls, const Dispatched* handle, const CombineRequest* request) {
        const at::AutoDispatchBelowADInplaceOrView below;
        const Tensor combined_x = run_combine(*calls, *handle, *request);
        const int64_t num_leading = request->expert_rows == nullptr ? -1 : rows[0].dim() - 2;
        ctx->saved_data["kept"] = kept_of(*calls, *handle, request->inputs.tokens_per_row, num_leading, weights.has_value());
        ctx->saved_data["has_bias"] = bias.has_value();
        variable_list saved{handle->memory, handle->call};
        if (weights) {
            saved.push_back(*weights);
            saved.insert(saved.end(), rows.begin(), rows.end());
        }
        ctx->save_for_backward(std::move(saved));
        return combined_x;
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
        return with_errors([&] {
            variable_list made = all_gradients(ctx->saved_data["kept"].toIntVector(), ctx->get_saved_variables(), grads);
            made.insert(made.begin() + 1, ctx->saved_data["has_bias"].toBool() ? grads[0] : Tensor());
            made.insert(made.end(), 3, Tensor());  // of what is no tensor
            return made;
        });
    }

private:
    static variable_list all_gradients(const std::vector<int64_t>& kept, const variable_list& saved, const variable_list& grads) {
        const at::TensorList scaled(saved.data() + 2, saved.size() - 2);
        variable_list made =
            natively(kept[kNumber], [&](Calls& calls) { return gradients(calls, dispatched_of(kept, saved), grads[0], scaled, kept); });
        if (made.empty())
            made = tensors_of(
                hooks().combine_gradients(handle_of(kept, saved), kept[kTokensPerRow], kept[kLeading], grads[0], py::cast(scaled.vec())));
        return made;
    }

    // Of weights, then of rows. scaled: the weights and the rows, or nothing.
    static variable_list gradients(Calls& calls, const Dispatched& handle, const Tensor& grad, at::TensorList scaled,
                                   const std::vector<int64_t>& kept) {
        if (!calls.is_here(grad)) return {};
        Outgoing out;
        out.x = as_rows(grad);
        RowScaling scaling{};
        Tensor grad_weights;
        if (!scaled.empty()) {
            std::optional<ExpertRowsArg> expert_rows;
            if (!calls.is_here(scaled[0]) || scaled[1].scalar_type() != out.x.scalar_type()) return {};
            if (kept[kLeading] >= 0) expert_rows = calls.expert_rows_of(scaled.slice(1), handle);
            if (kept[kLeading] >= 0 ? !expert_rows : !calls.takes_rows(handle, scaled[1])) return {};
            grad_weights = at::empty_like(scaled[0]);
            scaling = calls.scaling(scaled[0], scaled[1], expert_rows ? &*expert_rows : nullptr, grad_weights);
        }
        const Tensor grad_x = calls.dispatch_cached(handle, out, scaled.empty() ? nullptr : &scaling, -1).x;
        watch_pass(calls);
        variable_list made{grad_weights};
        append_rows(made, grad_x, calls, handle, kept[kLeading]);
        return made;
    }
};

}  // namespace

DispatchResult dispatch(Calls& calls, const DispatchRequest& request) {
    DispatchResult result;
    const Tensor &x = request.out.x, &weights = request.out.topk_weights;
    variable_list outputs = needs_gradients({&x, &weights}) ? DispatchFunction::apply(x, optional_of(weights), &calls, &request, &result)
                                                            : run_dispatch(calls, request, x, weights, result);
    const size_t first = weights.defined();
    if (weights.defined()) result.in.topk_weights = outputs[0];
    if (request.num_leading < 0)
        result.in.x = outputs[first];
    else
        result.parts.assign(outputs.begin() + first, outputs.end());
    return result;
}

Tensor combine(Calls& calls, const Dispatched& handle, const CombineRequest& request) {
    const CombineInputs& inputs = request.inputs;
    const bool rows_need = at::GradMode::is_enabled() &&
                           std::any_of(request.rows.begin(), request.rows.end(), [](const Tensor& t) { return t.requires_grad(); });
    if (!rows_need && !needs_gradients({&inputs.weights, &inputs.bias})) return run_combine(calls, handle, request);
    return CombineFunction::apply(optional_of(inputs.weights), optional_of(inputs.bias), at::TensorList(request.rows), &calls, &handle,
                                  &request);
}

}  // namespace deepep_moe

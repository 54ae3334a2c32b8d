// The two autograd functions, and the module. Backwards that ByExpert does not take are Python's.
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include "autograd/by_expert.h"

namespace deepep_moe {
namespace {

using torch::autograd::AutogradContext;

// Of Python, set once: `plain(number)`: the ByExpert of a buffer that can make a plain call now, or None; and the gradients of both
// functions.
struct Hooks {
    py::object plain, dispatch_gradients, combine_gradients;
};
Hooks& hooks() {
    static Hooks* const made = new Hooks;  // never destroyed: Python may be gone by then
    return *made;
}

// Are operations what they seem, or watched and transformed?
bool is_watched() {
    const c10::DispatchKeySet included = c10::impl::tls_local_dispatch_key_set().included_;
    const bool is_transformed =
        included.has(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) || included.has(c10::DispatchKey::FuncTorchDynamicLayerBackMode);
    return is_transformed || c10::impl::TorchDispatchModeTLS::any_modes_set();
}

// ---- rows by expert ----

// [1, ..., num_rows, hidden] with `num_leading` leading ones: the next rows of `all`, which does not know of it: autograd sees rows of
// their own.
Tensor rows_at(const Tensor& all, int64_t first_row, int64_t num_rows, int64_t num_leading) {
    auto part = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(all.storage()), all.key_set(), all.dtype());
    std::vector<int64_t> sizes(num_leading + 2, 1);
    sizes[num_leading] = num_rows, sizes[num_leading + 1] = all.size(1);
    part.unsafeGetTensorImpl()->set_storage_offset(all.storage_offset() + first_row * all.size(1));
    part.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
    return part;
}

void append_parts(variable_list& list, const Tensor& all, const ByExpert& owner, const Dispatched& handle, int64_t num_leading) {
    const int64_t* counts = owner.counts_of(handle);
    int64_t first_row = 0;
    for (int64_t expert = 0; expert < owner.settings.num_local_experts; first_row += counts[expert++])
        list.push_back(rows_at(all, first_row, counts[expert], num_leading));
}

// ---- what a backward keeps ----

enum Kept { kNumber, kNumRows, kNumTokens, kRepeats, kLeading, kHasWeights, kStarts, kNumKept = kStarts + 4 };

std::vector<int64_t> kept_of(const ByExpert& owner, const Dispatched& handle, int64_t repeats, int64_t num_leading, bool has_weights) {
    std::vector<int64_t> kept{owner.settings.number, handle.num_rows, handle.num_tokens, repeats, num_leading, has_weights};
    kept.insert(kept.end(), handle.starts.begin(), handle.starts.end());
    return kept;
}

Dispatched dispatched_of(const std::vector<int64_t>& kept, const Tensor& memory, const Tensor& call) {
    Dispatched handle{memory, call, kept[kNumRows], kept[kNumTokens]};
    std::copy_n(kept.begin() + kStarts, handle.starts.size(), handle.starts.begin());
    return handle;
}

py::tuple handle_of(const std::vector<int64_t>& kept, const variable_list& saved) {
    return py::make_tuple(kept[kNumber], kept[kNumTokens], kept[kNumRows], saved[0], saved[1]);
}

// `call(owner)` by the buffer of that number, if it can make it; an empty list where Python is to. The GIL is held.
template <class Call>
variable_list natively(int64_t number, const Call& call) {
    if (at::GradMode::is_enabled() || is_watched()) return {};
    const py::object found = hooks().plain(number);
    if (found.is_none()) return {};
    auto& owner = found.cast<ByExpert&>();
    const at::AutoDispatchBelowADInplaceOrView below;
    return owner.is_ready() ? owner.or_tell([&] { return call(owner); }) : variable_list{};
}

// What Python returns: a sequence of tensors and None.
variable_list tensors_of(const py::object& made) {
    variable_list list;
    for (const py::handle item : made) list.push_back(item.is_none() ? Tensor() : item.cast<Tensor>());
    return list;
}

// What `gradients()` returns. Python's errors leave as the engine takes them from its threads.
template <class Gradients>
variable_list with_errors(const Gradients& gradients) {
    const py::gil_scoped_acquire gil;
    try {
        return gradients();
    } catch (py::error_already_set& error) {
        error.restore();
        raise_python();
    }
}

py::object or_none(const Tensor& tensor) { return tensor.defined() ? py::cast(tensor) : py::none(); }

// ---- dispatch ----

struct DispatchByExpert : torch::autograd::Function<DispatchByExpert> {
    // Returns recv_topk_weights, if weights are sent, and the rows of each local expert.
    static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& topk_idx, const std::optional<Tensor>& topk_weights,
                                 ByExpert* owner, int64_t repeats, int64_t num_leading, Dispatched* made) {
        const at::AutoDispatchBelowADInplaceOrView below;
        Tensor recv_x, recv_weights;
        *made = owner->or_tell([&] {
            const Tensor sent = topk_weights ? topk_weights->reshape(topk_idx.sizes()) : Tensor();  // lane by lane
            return owner->dispatch({x, topk_idx, sent}, recv_x, recv_weights);
        });
        auto kept = kept_of(*owner, *made, repeats, num_leading, topk_weights.has_value());
        if (topk_weights) kept.insert(kept.end(), topk_weights->sizes().begin(), topk_weights->sizes().end());
        ctx->saved_data["kept"] = std::move(kept);
        ctx->save_for_backward({made->memory, made->call});
        variable_list outputs;
        if (topk_weights) outputs.push_back(recv_weights);
        append_parts(outputs, recv_x, *owner, *made, num_leading);
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
        const at::TensorList parts(grads.data() + has_weights, grads.size() - has_weights);
        variable_list made = natively(kept[kNumber], [&](ByExpert& owner) {
            return gradients(owner, dispatched_of(kept, saved[0], saved[1]), grad_weights, parts, kept);
        });
        if (made.empty())
            made = tensors_of(
                hooks().dispatch_gradients(handle_of(kept, saved), kept[kRepeats], or_none(grad_weights), py::cast(parts.vec())));
        if (has_weights) made[1] = made[1].view(weights_shape);
        return {made[0], {}, made[1], {}, {}, {}, {}};
    }

    static variable_list gradients(ByExpert& owner, const Dispatched& handle, const Tensor& grad_weights, at::TensorList parts,
                                   const std::vector<int64_t>& kept) {
        const auto where = owner.parts_of(parts, handle);
        if (!where || (grad_weights.defined() && !owner.is_here(grad_weights))) return {};
        const Tensor values = grad_weights.defined() ? grad_weights.contiguous() : Tensor();
        const auto [grad_x, combined] = owner.combine(handle, parts[0], *where, {}, values, {}, kept[kRepeats]);
        return {grad_x, combined};
    }
};

// ---- combine ----

struct CombineByExpert : torch::autograd::Function<CombineByExpert> {
    static Tensor forward(AutogradContext* ctx, const std::optional<Tensor>& weights, at::TensorList parts,
                          const std::optional<Tensor>& at_source, ByExpert* owner, const Dispatched* handle, const PartsArg* where) {
        const at::AutoDispatchBelowADInplaceOrView below;
        const int64_t repeats = at_source ? at_source->size(0) : 1;
        const Tensor combined_x = owner->or_tell([&] {
            return owner->combine(*handle, parts[0], *where, weights.value_or(Tensor()), {}, at_source.value_or(Tensor()), repeats).first;
        });
        ctx->saved_data["kept"] = kept_of(*owner, *handle, repeats, parts[0].dim() - 2, weights.has_value());
        variable_list saved{handle->memory, handle->call};
        if (weights) {
            saved.push_back(*weights);
            saved.insert(saved.end(), parts.begin(), parts.end());
        }
        ctx->save_for_backward(std::move(saved));
        return combined_x;
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
        return with_errors([&] { return all_gradients(ctx->saved_data["kept"].toIntVector(), ctx->get_saved_variables(), grads); });
    }

private:
    static variable_list all_gradients(const std::vector<int64_t>& kept, const variable_list& saved, const variable_list& grads) {
        const at::TensorList weighed(saved.data() + 2, saved.size() - 2);
        variable_list made = natively(kept[kNumber], [&](ByExpert& owner) {
            return gradients(owner, dispatched_of(kept, saved[0], saved[1]), grads[0], weighed, kept);
        });
        if (made.empty())
            made = tensors_of(
                hooks().combine_gradients(handle_of(kept, saved), kept[kRepeats], kept[kLeading], grads[0], py::cast(weighed.vec())));
        made.insert(made.end(), 4, Tensor());  // of at_source, and of what is no tensor
        return made;
    }

    // Of weights, then parts. weighed: the weights and the parts, or nothing.
    static variable_list gradients(ByExpert& owner, const Dispatched& handle, const Tensor& grad, at::TensorList weighed,
                                   const std::vector<int64_t>& kept) {
        if (!owner.is_here(grad)) return {};
        const Tensor rows = grad.contiguous();
        if (reinterpret_cast<uintptr_t>(rows.const_data_ptr()) % kRowAlignment != 0) return {};
        GpuWeighing weighing{};
        Tensor grad_weights;
        if (!weighed.empty()) {
            const auto where = owner.parts_of(weighed.slice(1), handle);
            if (!where || !owner.is_here(weighed[0]) || weighed[1].scalar_type() != rows.scalar_type()) return {};
            grad_weights = at::empty_like(weighed[0]);
            weighing = owner.weighing(weighed[0], weighed[1], *where, grad_weights);
        }
        const Tensor grad_x = owner.dispatch_cached(handle, rows, weighed.empty() ? nullptr : &weighing);
        variable_list made{grad_weights};
        append_parts(made, grad_x, owner, handle, kept[kLeading]);
        return made;
    }
};

// ---- what Python calls ----

// Tensors of PyTorch's own class, whose operations are what they seem.
bool are_plain(std::initializer_list<PyObject*> tensors) {
    return std::all_of(tensors.begin(), tensors.end(),
                       [](PyObject* tensor) { return tensor == Py_None || THPVariable_CheckExact(tensor); });
}

Tensor unpacked(py::handle tensor) { return tensor.is_none() ? Tensor() : THPVariable_Unpack(tensor.ptr()); }
std::optional<Tensor> optional_of(const Tensor& tensor) { return tensor.defined() ? std::optional(tensor) : std::nullopt; }

// (parts, recv_topk_weights, shape, num_rows, memory, call), the latter four for the handle; or None where Python is to make the call.
py::object dispatch(ByExpert& owner, py::handle x, py::handle topk_idx, py::handle topk_weights, int64_t num_leading, int64_t repeats) {
    if (is_watched() || !owner.is_ready() || !are_plain({x.ptr(), topk_idx.ptr(), topk_weights.ptr()})) return py::none();
    const Tensor rows = unpacked(x), idx = unpacked(topk_idx), weights = unpacked(topk_weights);
    if (!owner.takes({rows, idx, weights}, repeats)) return py::none();
    Dispatched made;
    const variable_list outputs = DispatchByExpert::apply(rows, idx, optional_of(weights), &owner, repeats, num_leading, &made);
    const size_t first = weights.defined();
    py::tuple parts(outputs.size() - first);
    for (size_t i = first; i < outputs.size(); ++i) parts[i - first] = outputs[i];
    return py::make_tuple(parts, weights.defined() ? py::cast(outputs[0]) : py::none(), owner.shape_of(made.num_tokens).shape,
                          made.num_rows, made.memory, made.call);
}

// combined_x, or None where Python is to make the call. memory, call, starts, num_rows, num_tokens: of the handle, a `PackedHandle`.
py::object combine(ByExpert& owner, py::handle tensors, py::handle weights, py::handle at_source, const Tensor& memory, const Tensor& call,
                   py::handle starts, int64_t num_rows, int64_t num_tokens) {
    if (is_watched() || !owner.is_ready() || !are_plain({weights.ptr(), at_source.ptr()})) return py::none();
    variable_list parts;
    for (const py::handle tensor : py::reinterpret_borrow<py::sequence>(tensors)) {
        if (!THPVariable_CheckExact(tensor.ptr())) return py::none();
        parts.push_back(THPVariable_Unpack(tensor.ptr()));
    }
    Dispatched handle{memory, call, num_rows, num_tokens};
    for (size_t i = 0; i < handle.starts.size(); ++i) handle.starts[i] = py::reinterpret_borrow<py::int_>(PyTuple_GetItem(starts.ptr(), i));
    const Tensor given = unpacked(weights), source = unpacked(at_source);
    const auto where = parts.empty() ? std::nullopt : owner.parts_of(parts, handle);
    if (!where || !owner.takes_weights(given, source, handle)) return py::none();
    return py::cast(CombineByExpert::apply(optional_of(given), at::TensorList(parts), optional_of(source), &owner, &handle, &*where));
}

}  // namespace
}  // namespace deepep_moe

PYBIND11_MODULE(_autograd, m) {
    using namespace deepep_moe;
    m.attr("TORCH_VERSION") = DEEPEP_MOE_TORCH;
    m.attr("GPU_CALLS_BYTES") = kGpuCallsBytes;
    py::class_<ByExpert>(m, "ByExpert")
        .def(py::init([](py::object communicator, int64_t number, int64_t num_ranks, int64_t num_local_experts, int64_t num_topk,
                         int64_t hidden, int64_t num_max_tokens, int num_sms, int num_sms_of_sums, const at::Device& device,
                         py::object shape_of, py::object current_stream, py::object abort) {
                 const ByExpert::Settings settings{
                     number, num_ranks, num_local_experts, num_topk, hidden, num_max_tokens, num_sms, num_sms_of_sums,
                 };
                 return std::make_unique<ByExpert>(std::move(communicator), settings, device, std::move(shape_of),
                                                   std::move(current_stream), std::move(abort));
             }),
             py::kw_only(), py::arg("communicator"), py::arg("number"), py::arg("num_ranks"), py::arg("num_local_experts"),
             py::arg("num_topk"), py::arg("hidden"), py::arg("num_max_tokens"), py::arg("num_sms"), py::arg("num_sms_of_sums"),
             py::arg("device"), py::arg("shape_of"), py::arg("current_stream"), py::arg("abort"))
        .def("release", &ByExpert::release)
        .def("dispatch", torch::wrap_pybind_function(dispatch), py::arg("x"), py::arg("topk_idx"), py::arg("topk_weights"),
             py::arg("num_leading"), py::arg("repeats"))
        .def("combine", torch::wrap_pybind_function(combine), py::arg("parts"), py::arg("weights"), py::arg("at_source"), py::arg("memory"),
             py::arg("call"), py::arg("starts"), py::arg("num_rows"), py::arg("num_tokens"));
    m.def(
        "set_hooks",
        [](py::object plain, py::object dispatch_gradients, py::object combine_gradients) {
            hooks() = {std::move(plain), std::move(dispatch_gradients), std::move(combine_gradients)};
        },
        py::kw_only(), py::arg("plain"), py::arg("dispatch_gradients"), py::arg("combine_gradients"));
}

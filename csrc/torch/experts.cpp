// Runs SwiGLU experts in grouped products from C++, with few steps of the host, for bf16 rows and counts on a GPU. It declines every other
// call by None, and Python makes that one (deepep_moe/ops/grouped_mlp.py), with the same bits.
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/graph_task.h>

#include "torch/streams.h"

namespace deepep_moe {
namespace {

using torch::autograd::AutogradContext;

struct Experts {
    Tensor x, counts, w1, w2, probs;  // [R, in], [E], [E, 2 m, in], [E, out, m], [R] or undefined
    bool recomputes = false;
    Tensor main_grad1, main_grad2;  // in the form of w1 and w2, or undefined
};

// ---- which calls are made here ----

bool is_dense(const Tensor& tensor, const at::Device& device, at::ScalarType type, int64_t dims) {
    return is_on(device, tensor) && tensor.scalar_type() == type && tensor.dim() == dims && tensor.is_contiguous() && is_aligned(tensor);
}

bool are_whole_pieces(std::initializer_list<int64_t> columns) {  // columns are bf16
    return std::all_of(columns.begin(), columns.end(), [](int64_t count) { return count > 0 && count * 2 % kRowAlignment == 0; });
}

bool takes(const Experts& e) {
    if (!e.x.defined() || !e.counts.defined() || !e.w1.defined() || !e.w2.defined()) return false;
    const at::Device device = e.x.device();
    if (at::autocast::is_autocast_enabled(device.type())) return false;
    if (!is_dense(e.x, device, at::kBFloat16, 2) || !is_dense(e.w1, device, at::kBFloat16, 3) || !is_dense(e.w2, device, at::kBFloat16, 3))
        return false;
    const int64_t num_rows = e.x.size(0), in = e.x.size(1), num_experts = e.w1.size(0), middle = e.w2.size(2);
    if (num_rows == 0 || e.w1.size(2) != in || e.w1.size(1) != 2 * middle || e.w2.size(0) != num_experts) return false;
    if (!are_whole_pieces({in, middle, e.w2.size(1)})) return false;
    const bool counts_fit =
        is_on(device, e.counts) && is_index(e.counts.scalar_type()) && e.counts.sizes() == at::IntArrayRef({num_experts});
    const bool probs_fit = !e.probs.defined() || has_form(device, e.probs, at::kFloat, {num_rows});
    const auto fits = [&](const Tensor& main_grad, const Tensor& weight) {
        return !main_grad.defined() || (is_on(device, main_grad) && main_grad.sizes() == weight.sizes());
    };
    return counts_fit && probs_fit && fits(e.main_grad1, e.w1) && fits(e.main_grad2, e.w2);
}

// ---- products and launches ----

Tensor grouped_mm(const Tensor& a, const Tensor& b, const Tensor& group_ends) {
    using Product =
        Tensor(const Tensor&, const Tensor&, const std::optional<Tensor>&, const std::optional<Tensor>&, std::optional<at::ScalarType>);
    static const auto product = c10::Dispatcher::singleton().findSchemaOrThrow("aten::_grouped_mm", "").typed<Product>();
    return product.call(a, b, group_ends, std::nullopt, std::nullopt);
}

bool add_weight_gradients(const Tensor& grads, const Tensor& rows, const Tensor& group_ends, const Tensor& main_grad) {
    if (main_grad.scalar_type() != at::kFloat || !main_grad.is_contiguous() || !is_aligned(main_grad)) return false;
    GpuWeightGradientParams params = weight_gradients_of(arg_of(grads), arg_of(rows), arg_of(group_ends), arg_of(main_grad));
    params.sums = data_of<float>(main_grad);  // the kernel writes there
    return kernels->add_weight_gradients(params, call_stream(grads.device()));
}

// Does what `weight_gradients` of grouped_products.py does. With `main_grad` it adds the gradients there, and the result has no meaning.
Tensor weight_gradients(const Tensor& grads, const Tensor& rows, const Tensor& group_ends, const Tensor& main_grad) {
    if (main_grad.defined() && add_weight_gradients(grads, rows, group_ends, main_grad))
        return at::empty(main_grad.sizes(), grads.options());
    const Tensor grad_weights = grouped_mm(grads.t(), rows, group_ends);
    if (main_grad.defined()) main_grad.add_(grad_weights);
    return grad_weights;
}

GpuSwigluParams params_of(const Tensor& inner, const Tensor& probs, const Tensor& group_ends, const Tensor& y) {
    return swiglu_of(arg_of(inner), arg_of(probs), arg_of(group_ends), arg_of(y), DType::kBFloat16);
}

Tensor like_half_of(const Tensor& inner) { return at::empty({inner.size(0), inner.size(1) / 2}, inner.options()); }

// ---- the function ----

struct SwigluExperts : torch::autograd::Function<SwigluExperts> {
    static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& w1, const Tensor& w2,
                          const std::optional<Tensor>& given_probs, const Tensor& group_ends, bool recomputes,
                          const std::optional<Tensor>& main_grad1, const std::optional<Tensor>& main_grad2) {
        const at::AutoDispatchBelowADInplaceOrView below;
        const c10::OptionalDeviceGuard guard(x.device());
        const Tensor probs = given_probs.value_or(Tensor());
        const Tensor inner = grouped_mm(x, w1.transpose(1, 2), group_ends), y = like_half_of(inner);
        launch_kernel(kernels->swiglu, params_of(inner, probs, group_ends, y), x.device());
        ctx->save_for_backward({x, w1, w2, probs, group_ends, inner, recomputes ? Tensor() : y});
        // These are not saved with the others, because backwards of other micro-batches add to them in between.
        ctx->saved_data = {{"main_grad1", main_grad1}, {"main_grad2", main_grad2}};
        return grouped_mm(y, w2.transpose(1, 2), group_ends);
    }

    static variable_list backward(AutogradContext* ctx, variable_list& grads) {
        return with_errors([&] {
            const variable_list saved = ctx->get_saved_variables();
            variable_list input_grads;
            {
                const at::AutoDispatchBelowADInplaceOrView below;
                const auto main_grad = [&](const char* name) { return ctx->saved_data[name].toOptional<Tensor>().value_or(Tensor()); };
                input_grads =
                    gradients(saved, std::move(grads[0]), {ctx->needs_input_grad(0), ctx->needs_input_grad(1), ctx->needs_input_grad(2)},
                              main_grad("main_grad1"), main_grad("main_grad2"));
            }
            if (at::GradMode::is_enabled()) {  // as once_differentiable does in Python
                for (Tensor& gradient : input_grads)
                    if (gradient.defined()) gradient.set_requires_grad(true);
                const auto refused = std::make_shared<torch::autograd::DelayedError>(
                    "deepep_moe.ops.grouped_mlp can be differentiated once; detach its gradients, or leave out create_graph",
                    static_cast<int64_t>(input_grads.size()));
                input_grads = (*refused)(std::move(input_grads));
            }
            input_grads.resize(8);  // gradients of all arguments of the forward
            return input_grads;
        });
    }

private:
    struct Needs {
        bool x, w1, w2;
    };

    // Gives back what only it holds before it makes the gradients of weights, which are large.
    static variable_list gradients(const variable_list& saved, Tensor grad, const Needs& needs, const Tensor& main_grad1,
                                   const Tensor& main_grad2) {
        const Tensor &x = saved[0], &w1 = saved[1], &w2 = saved[2], &probs = saved[3], &group_ends = saved[4], &inner = saved[5];
        const c10::OptionalDeviceGuard guard(x.device());
        grad = grad.contiguous();
        if (!is_aligned(grad)) grad = grad.clone();
        Tensor grad_y = grouped_mm(grad, w2, group_ends), y = saved[6].defined() ? saved[6] : like_half_of(inner);
        // If no other backward needs `inner`, its gradient takes its place. (A hook of saved tensors that keeps it sees that.)
        const Tensor grad_inner = torch::autograd::get_current_graph_task_keep_graph() ? at::empty_like(inner) : inner;
        const Tensor grad_probs = probs.defined() ? at::empty_like(probs) : Tensor();
        GpuSwigluParams params = params_of(inner, probs, group_ends, saved[6].defined() ? Tensor() : y);
        params.grad = data_of<std::byte>(grad_y);
        params.grad_inner = data_of<std::byte>(grad_inner);
        params.grad_probs = data_of<float>(grad_probs);
        launch_kernel(kernels->swiglu_backward, params, x.device());
        grad_y.reset();
        variable_list input_grads(4);
        if (needs.w2) input_grads[2] = weight_gradients(grad, y, group_ends, main_grad2);
        grad.reset(), y.reset();
        if (needs.x) input_grads[0] = grouped_mm(grad_inner, w1, group_ends);
        if (needs.w1) input_grads[1] = weight_gradients(grad_inner, x, group_ends, main_grad1);
        input_grads[3] = grad_probs;
        return input_grads;
    }
};

// Computes `deepep_moe.ops.grouped_mlp` without biases and with zero_tail=False. The arguments have the same names. main_grad1 and
// main_grad2 are its `main_grads`.
py::object grouped_swiglu(py::handle x, py::handle counts, py::handle w1, py::handle w2, py::handle probs, bool recompute_activation,
                          py::handle main_grad1, py::handle main_grad2) {
    if (is_watched() || !are_plain({x, counts, w1, w2, probs, main_grad1, main_grad2})) return py::none();
    const Experts e{unpacked(x),     unpacked(counts),     unpacked(w1),         unpacked(w2),
                    unpacked(probs), recompute_activation, unpacked(main_grad1), unpacked(main_grad2)};
    if (!takes(e)) return py::none();
    Tensor group_ends;
    {
        const at::AutoDispatchBelowADInplaceOrView below;
        const c10::OptionalDeviceGuard guard(e.x.device());
        group_ends = at::cumsum(e.counts, 0, at::kInt).clamp_max_(e.x.size(0));
    }
    return py::cast(SwigluExperts::apply(e.x, e.w1, e.w2, optional_of(e.probs), group_ends, e.recomputes, optional_of(e.main_grad1),
                                         optional_of(e.main_grad2)));
}

}  // namespace

void bind_experts(py::module_& m) {
    m.def("grouped_swiglu", torch::wrap_pybind_function(grouped_swiglu), py::arg("x"), py::arg("counts"), py::arg("w1"), py::arg("w2"),
          py::arg("probs"), py::arg("recompute_activation"), py::arg("main_grad1"), py::arg("main_grad2"));
}

}  // namespace deepep_moe

// Runs the gate from C++ for plain tensors on a GPU: checks, outputs, launch and gradient in one call of Python. It declines every other
// call by None, and Python makes that one.
#include <torch/csrc/Dtype.h>

#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <string_view>
#include <tuple>

#include "torch/streams.h"

namespace deepep_moe {
namespace {

using torch::autograd::AutogradContext;

struct Declined {};  // thrown where Python is to make the call

// The results of the gate, those that are wanted.
struct Gated {
    Tensor topk_idx, topk_weights, counts, probs, routing_map, is_token_in_rank, shares;  // counts: of experts, then of ranks
};

// ---- arguments ----

constexpr const char* kScoreFunctions[] = {"sigmoid", "sqrtsoftplus", "softmax", "softmax_topk"};  // in the order of ScoreFunction

int int_in(py::handle argument) {
    int overflow = 0;
    const long value = PyLong_CheckExact(argument.ptr()) ? PyLong_AsLongAndOverflow(argument.ptr(), &overflow) : -1;
    if (overflow != 0 || value < 0 || value > std::numeric_limits<int>::max()) throw Declined{};
    return static_cast<int>(value);
}

bool bool_in(py::handle argument) {
    if (!PyBool_Check(argument.ptr())) throw Declined{};
    return argument.ptr() == Py_True;
}

double finite_in(py::handle argument) {
    const bool is_float = PyFloat_CheckExact(argument.ptr());
    const double value = is_float ? PyFloat_AS_DOUBLE(argument.ptr()) : int_in(argument);
    if (!std::isfinite(value)) throw Declined{};
    return value;
}

ScoreFunction score_function_in(py::handle argument) {
    if (PyUnicode_Check(argument.ptr()))
        for (int i = 0; i < static_cast<int>(std::size(kScoreFunctions)); ++i)
            if (PyUnicode_CompareWithASCIIString(argument.ptr(), kScoreFunctions[i]) == 0) return static_cast<ScoreFunction>(i);
    throw Declined{};
}

at::ScalarType index_type_in(py::handle argument) {
    if (!THPDtype_Check(argument.ptr())) throw Declined{};
    const at::ScalarType type = reinterpret_cast<THPDtype*>(argument.ptr())->scalar_type;
    if (!is_index(type)) throw Declined{};
    return type;
}

struct Request {
    Tensor logits, expert_bias, mask;
    GateOptions options{};
    bool dense = false, shares = false;
    int num_ranks = 0;
};

bool is_like(const Tensor& tensor, const Tensor& logits, at::ScalarType type, int64_t size) {
    return !tensor.defined() ||
           (is_on(logits.device(), tensor) && tensor.scalar_type() == type && tensor.dim() == 1 && tensor.size(0) == size);
}

bool takes(const Request& request) {
    const Tensor& logits = request.logits;
    if (!logits.defined() || logits.dim() != 2 || !is_on(logits.device(), logits) || !can_be_summed(logits.scalar_type())) return false;
    const int64_t num_tokens = logits.size(0), num_experts = logits.size(1);
    return num_experts <= kMaxGateExperts && is_like(request.expert_bias, logits, at::kFloat, num_experts) &&
           is_like(request.mask, logits, at::kBool, num_tokens);
}

// ---- launches ----

Tensor contiguous(const Tensor& tensor) { return tensor.defined() ? tensor.contiguous() : tensor; }
int index_of(const at::Device& device) {
    return device.has_index() ? device.index() : 0;
}  // does what `device_index` of deepep_moe/device.py does

// Counts that the last launch on a stream has zeroed for the next one: a launch that does nothing else would take as long as half a gate.
class Counts {
public:
    // Zeros for this launch. A CUDA graph brings its own, zeroed at every replay; so does a stream that its owner may destroy, whose
    // address another stream may have by the next launch.
    Counts(const Tensor& logits, int64_t size, uintptr_t stream)
        : key_(logits.device().index(), stream, size, c10::InferenceMode::is_enabled()) {
        const at::TensorOptions options = logits.options().dtype(at::kInt);
        const bool brings_its_own = logits.size(0) == 0 || (stream & kExternalStream) != 0 || kernels->is_capturing(stream);
        if (const auto zeros = brings_its_own ? zeroed().end() : zeroed().find(key_); zeros != zeroed().end()) {
            now = std::move(zeros->second);
            zeroed().erase(zeros);
        } else {
            now = at::zeros({size}, options);
        }
        if (!brings_its_own) next = at::empty({size}, options);
    }
    void keep() {  // the launch was made
        if (next.defined()) zeroed()[key_] = next;
    }

    Tensor now, next;

private:
    using Key = std::tuple<int, uintptr_t, int64_t, bool>;  // device, stream, size, and whether in inference mode
    static std::map<Key, Tensor>& zeroed() {
        static auto* const instance = new std::map<Key, Tensor>;
        return *instance;
    }
    const Key key_;
};

Gated launch_forward(const Request& request) {
    const c10::OptionalDeviceGuard guard(request.logits.device());
    const GateOptions& o = request.options;
    const Tensor logits = request.logits.contiguous();
    const Tensor expert_bias = contiguous(request.expert_bias), mask = contiguous(request.mask);
    const auto empty = [&](int64_t num_columns, at::ScalarType type) {
        return at::empty({o.num_tokens, num_columns}, at::TensorOptions(logits.device()).dtype(type));
    };
    const uintptr_t stream = call_stream(logits.device());
    Counts counts(logits, o.num_experts + request.num_ranks, stream);
    Gated out{empty(o.num_topk, o.index64 ? at::kLong : at::kInt), empty(o.num_topk, at::kFloat), counts.now, {}, {}, {}, {}};
    if (request.dense) out.probs = empty(o.num_experts, at::kFloat), out.routing_map = empty(o.num_experts, at::kBool);
    if (request.num_ranks > 0) out.is_token_in_rank = empty(request.num_ranks, at::kBool);
    if (request.shares) out.shares = empty(o.num_experts, at::kFloat);
    const GpuGateParams params{o,
                               data_of<void>(logits),
                               data_of<float>(expert_bias),
                               data_of<bool>(mask),
                               data_of<void>(out.topk_idx),
                               data_of<float>(out.topk_weights),
                               data_of<int32_t>(out.counts),
                               data_of<float>(out.shares),
                               data_of<float>(out.probs),
                               data_of<bool>(out.routing_map),
                               request.num_ranks,
                               data_of<bool>(out.is_token_in_rank),
                               data_of<int32_t>(counts.next),
                               nullptr,
                               index_of(logits.device())};
    if (!kernels->gate(params, stream)) throw Declined{};
    counts.keep();
    return out;
}

struct Gradients {
    Tensor weights, probs, shares;  // undefined where there is none
};

// Returns an undefined tensor if a kernel does not take the arguments.
Tensor launch_backward(const Gradients& grads, const Tensor& given_logits, const Tensor& topk_idx, GateOptions options) {
    for (const Tensor* grad : {&grads.weights, &grads.probs, &grads.shares})
        if (grad->defined() && (!is_on(given_logits.device(), *grad) || grad->scalar_type() != at::kFloat)) return {};
    const c10::OptionalDeviceGuard guard(given_logits.device());
    const Tensor weights = contiguous(grads.weights), probs = contiguous(grads.probs), shares = contiguous(grads.shares);
    const Tensor logits = given_logits.contiguous(), chosen = topk_idx.contiguous(), grad_logits = at::empty_like(logits);
    const GpuGateBackwardParams params{options,
                                       data_of<void>(logits),
                                       data_of<void>(chosen),
                                       data_of<float>(weights),
                                       data_of<float>(shares),
                                       data_of<void>(grad_logits),
                                       data_of<float>(probs),
                                       index_of(logits.device())};
    return kernels->gate_backward(params, call_stream(logits.device())) ? grad_logits : Tensor();
}

// ---- the function ----

// A backward keeps this beside logits and topk_idx.
struct KeptOfGate : torch::CustomClassHolder {
    const GateOptions options;
    const bool has_probs, has_shares;
    KeptOfGate(const GateOptions& options, const Gated& out)
        : options(options), has_probs(out.probs.defined()), has_shares(out.shares.defined()) {}
};

struct GateFunction : torch::autograd::Function<GateFunction> {
    // Returns topk_weights, probs and shares as far as they are wanted, then the outputs without gradient.
    static variable_list forward(AutogradContext* ctx, const Tensor& logits, const std::optional<Tensor>&, const std::optional<Tensor>&,
                                 const Request* request, Gated* out) {
        const at::AutoDispatchBelowADInplaceOrView below;
        *out = launch_forward(*request);
        ctx->set_materialize_grads(false);
        ctx->save_for_backward({logits, out->topk_idx});
        ctx->saved_data["kept"] = c10::IValue::make_capsule(c10::make_intrusive<KeptOfGate>(request->options, *out));
        variable_list outputs;
        for (const Tensor* tensor : fields_of(*out))
            if (tensor->defined()) outputs.push_back(*tensor);
        return outputs;
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
        const auto held = ctx->saved_data["kept"].toCapsule();
        const KeptOfGate& kept = *static_cast<const KeptOfGate*>(held.get());
        const Gradients out_grads{grads[0], kept.has_probs ? grads[1] : Tensor(), kept.has_shares ? grads[1 + kept.has_probs] : Tensor()};
        variable_list input_grads(5);  // gradients of all arguments of the forward
        if (out_grads.weights.defined() || out_grads.probs.defined() || out_grads.shares.defined())
            input_grads[0] = gradient(out_grads, ctx->get_saved_variables(), kept);
        return input_grads;
    }

    static std::array<Tensor*, 7> fields_of(Gated& out) {
        return {&out.topk_weights, &out.probs, &out.shares, &out.topk_idx, &out.counts, &out.routing_map, &out.is_token_in_rank};
    }

    static void replace(Gated& out, const variable_list& by) {
        size_t i = 0;
        for (Tensor* tensor : fields_of(out))
            if (tensor->defined()) *tensor = by[i++];
    }

private:
    static Tensor gradient(const Gradients& grads, const variable_list& saved, const KeptOfGate& kept) {
        const Tensor &logits = saved[0], &topk_idx = saved[1];
        const GateOptions& o = kept.options;
        return with_errors([&] {
            if (!at::GradMode::is_enabled() && !is_watched()) {
                const at::AutoDispatchBelowADInplaceOrView below;
                if (const Tensor grad = launch_backward(grads, logits, topk_idx, o); grad.defined()) return grad;
            }
            return py::module_::import("deepep_moe.ops.gate_operators")
                .attr("gradient_of_logits")(grads.weights, grads.probs, grads.shares, logits, topk_idx,
                                            kScoreFunctions[static_cast<int>(o.score_function)], o.normalize, o.routed_scaling_factor)
                .cast<Tensor>();
        });
    }
};

Gated outputs_of(const Request& request) {
    if (!needs_gradients({&request.logits, &request.expert_bias, &request.mask})) {
        const at::AutoDispatchBelowADInplaceOrView below;
        return launch_forward(request);
    }
    Gated out;
    GateFunction::replace(out,
                          GateFunction::apply(request.logits, optional_of(request.expert_bias), optional_of(request.mask), &request, &out));
    return out;
}

// Returns the class of that name in deepep_moe/ops/gate.py.
py::object& class_of(const char* name) {
    static auto& classes = *new std::map<std::string_view, py::object>;  // never destroyed: Python may be gone by then
    py::object& named = classes[name];
    if (!named) named = py::module_::import("deepep_moe.ops.gate").attr(name);
    return named;
}

py::object packed_output(const Gated& out) { return class_of("GateOutput")(out.topk_idx, out.topk_weights, out.counts); }

py::object packed_full_output(const Gated& out, const Request& request) {
    Tensor per_expert = out.counts, per_rank;
    if (request.num_ranks > 0) {
        per_expert = out.counts.narrow(0, 0, request.options.num_experts);
        per_rank = out.counts.narrow(0, request.options.num_experts, request.num_ranks);
    }
    return class_of("FullGateOutput")(out.topk_idx, out.topk_weights, per_expert, out.probs, out.routing_map, per_rank,
                                      out.is_token_in_rank, out.shares);
}

// Arguments in the order of `deepep_moe.ops.gate`, then those of `gate_full`. Returns `GateOutput`, or `FullGateOutput` where it `is_full`,
// or None where Python is to make the call. A call that Python has checked has no gradient and returns `Gated`, or None if a kernel has
// reported a value that is not finite.
py::object gate(py::handle logits, py::handle num_topk, py::handle num_groups, py::handle topk_groups, py::handle group_score_topk,
                py::handle score_function, py::handle expert_bias, py::handle normalize, py::handle routed_scaling_factor, py::handle mask,
                py::handle index_dtype, py::handle check_finite, py::handle dense, py::handle num_ranks, py::handle shares, bool is_full,
                bool is_checked) {
    try {
        if (!is_checked && (is_watched() || !are_plain({logits, expert_bias, mask}))) throw Declined{};
        Request request{unpacked(logits), unpacked(expert_bias), unpacked(mask)};
        if (!is_checked && !takes(request)) throw Declined{};
        const Tensor& given = request.logits;
        request.options = {given.size(0),
                           static_cast<int>(given.size(1)),
                           int_in(num_topk),
                           int_in(num_groups),
                           int_in(topk_groups),
                           int_in(group_score_topk),
                           score_function_in(score_function),
                           bool_in(normalize),
                           finite_in(routed_scaling_factor),
                           dtype_of(given.scalar_type()),
                           index_type_in(index_dtype) == at::kLong,
                           bool_in(check_finite)};
        request.dense = bool_in(dense), request.num_ranks = int_in(num_ranks), request.shares = bool_in(shares);
        if (is_checked) return py::cast(launch_forward(request));
        if (!are_valid_on_gpu(request.options, request.num_ranks)) return py::none();
        const Gated out = outputs_of(request);
        return is_full ? packed_full_output(out, request) : packed_output(out);
    } catch (const Declined&) {
        return py::none();
    }
}

Tensor run_gate_backward(const OptionalTensor& grad_topk_weights, const OptionalTensor& grad_probs, const OptionalTensor& grad_shares,
                         const Tensor& logits, const Tensor& topk_idx, py::handle score_function, bool normalize,
                         double routed_scaling_factor) {
    try {
        const GateOptions options{logits.size(0),
                                  static_cast<int>(logits.size(1)),
                                  static_cast<int>(topk_idx.size(1)),
                                  1,
                                  1,
                                  1,
                                  score_function_in(score_function),
                                  normalize,
                                  routed_scaling_factor,
                                  dtype_of(logits.scalar_type()),
                                  topk_idx.scalar_type() == at::kLong};
        const Gradients grads{or_none(grad_topk_weights), or_none(grad_probs), or_none(grad_shares)};
        return launch_backward(grads, logits, topk_idx, options);
    } catch (const Declined&) {
        return {};
    }
}

}  // namespace

void bind_gate(py::module_& m) {
    using torch::wrap_pybind_function;
    py::class_<Gated>(m, "Gated")
        .def_readonly("topk_idx", &Gated::topk_idx)
        .def_readonly("topk_weights", &Gated::topk_weights)
        .def_readonly("counts", &Gated::counts)
        .def_readonly("probs", &Gated::probs)
        .def_readonly("routing_map", &Gated::routing_map)
        .def_readonly("is_token_in_rank", &Gated::is_token_in_rank)
        .def_readonly("shares", &Gated::shares);
    const py::arg logits("logits"), score_function("score_function"), normalize("normalize"), factor("routed_scaling_factor");
    m.def("gate", wrap_pybind_function(gate), logits, py::arg("num_topk"), py::arg("num_groups"), py::arg("topk_groups"),
          py::arg("group_score_topk"), score_function, py::arg("expert_bias"), normalize, factor, py::arg("mask"), py::arg("index_dtype"),
          py::arg("check_finite"), py::arg("dense"), py::arg("num_ranks"), py::arg("shares"), py::arg("is_full") = false,
          py::arg("is_checked") = false);
    m.def("run_gate_backward", wrap_pybind_function(run_gate_backward), py::kw_only(), py::arg("grad_topk_weights"), py::arg("grad_probs"),
          py::arg("grad_shares"), logits, py::arg("topk_idx"), score_function, normalize, factor);
}

}  // namespace deepep_moe

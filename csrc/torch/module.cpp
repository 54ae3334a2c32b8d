// The module `deepep_moe._torch`: what Python calls. Each function returns None where Python is to make the call.
#include "torch/experts.h"
#include "torch/functions.h"
#include "torch/gate.h"
#include "torch/low_latency.h"

namespace deepep_moe {
namespace {

// Of an attribute, made once.
struct Name {
    PyObject* const text;
    explicit Name(const char* name) : text(PyUnicode_InternFromString(name)) {}
    py::object of(py::handle owner) const {
        PyObject* const found = PyObject_GetAttr(owner.ptr(), text);
        if (found == nullptr) throw py::error_already_set();
        return py::reinterpret_steal<py::object>(found);
    }
};

// What a call reads of a `DispatchHandle`; nothing where it is not a handle of this buffer that lies in one tensor.
std::optional<Dispatched> dispatched_of(const Calls& calls, py::handle handle) {
    static const Name kBufferId{"buffer_id"}, kMemory{"memory"}, kCall{"call"}, kNumRows{"num_rows"}, kNumTokens{"num_tokens"},
        kStarts{"starts"}, kLayout{"layout"}, kAlignment{"expert_alignment"};
    if (!PyObject_HasAttr(handle.ptr(), kMemory.text)) return std::nullopt;
    const py::object memory = kMemory.of(handle), call = kCall.of(handle), starts = py::reinterpret_borrow<py::object>(kStarts.of(handle));
    if (memory.is_none() || !are_plain({memory, call}) || kBufferId.of(handle).cast<int64_t>() != calls.settings.number)
        return std::nullopt;
    Dispatched made{unpacked(memory), unpacked(call), kNumRows.of(handle).cast<int64_t>(), kNumTokens.of(handle).cast<int64_t>()};
    for (size_t i = 0; i < made.starts.size(); ++i) made.starts[i] = PyLong_AsLongLong(PyTuple_GetItem(starts.ptr(), i));
    made.is_expert_layout = PyUnicode_CompareWithASCIIString(kLayout.of(handle).ptr(), "expert") == 0;
    made.expert_alignment = kAlignment.of(handle).cast<int64_t>();
    return calls.is_here(made.memory) && has_memory(made.call) ? std::optional(made) : std::nullopt;
}

// (recv_x, recv_x_scales, recv_topk_idx, recv_topk_weights, num_recv_tokens_per_expert, shape, num_rows, memory, call), the latter four for
// the handle.
py::object dispatch_rows(Calls& calls, py::handle x, py::handle x_scales, py::handle topk_idx, py::handle topk_weights,
                         bool is_expert_layout, int64_t expert_alignment, int64_t num_recv_rows, int num_sms) {
    if (is_watched() || !calls.is_ready() || !are_plain({x, x_scales, topk_idx, topk_weights})) return py::none();
    DispatchRequest request;
    request.out = {unpacked(x), unpacked(x_scales), unpacked(topk_idx), unpacked(topk_weights)};
    request.is_expert_layout = is_expert_layout;
    request.expert_alignment = expert_alignment;
    request.num_recv_rows = num_recv_rows;
    request.num_sms = num_sms;
    if (!calls.takes(request.out)) return py::none();
    if (request.out.topk_weights.defined() && request.out.topk_weights.sizes() != request.out.topk_idx.sizes()) return py::none();
    const DispatchResult made = dispatch(calls, request);
    return py::make_tuple(made.in.x, packed(made.in.x_scales), packed(made.in.topk_idx), packed(made.in.topk_weights),
                          calls.tokens_per_expert(made.handle), calls.shape_of(made.handle.num_tokens, is_expert_layout),
                          made.handle.num_rows, made.handle.memory, made.handle.call);
}

// (recv_x, recv_x_scales, recv_topk_weights).
py::object dispatch_along(Calls& calls, py::handle x, py::handle x_scales, py::handle topk_weights, py::handle handle, int num_sms) {
    if (is_watched() || !calls.is_ready() || !are_plain({x, x_scales, topk_weights})) return py::none();
    const std::optional<Dispatched> along = dispatched_of(calls, handle);
    DispatchRequest request;
    request.out.x = unpacked(x), request.out.x_scales = unpacked(x_scales), request.out.topk_weights = unpacked(topk_weights);
    if (!along || !calls.takes_along(*along, request.out)) return py::none();
    request.along = &*along;
    request.num_sms = num_sms;
    const DispatchResult made = dispatch(calls, request);
    return py::make_tuple(made.in.x, packed(made.in.x_scales), packed(made.in.topk_weights));
}

// combined_x.
py::object combine_rows(Calls& calls, py::handle x, py::handle handle, py::handle topk_weights, py::handle bias, int num_sms) {
    if (is_watched() || !calls.is_ready() || !are_plain({x, topk_weights, bias})) return py::none();
    const std::optional<Dispatched> along = dispatched_of(calls, handle);
    CombineRequest request;
    request.rows = {unpacked(x)};
    request.inputs.weights = unpacked(topk_weights), request.inputs.bias = unpacked(bias);
    request.num_sms = num_sms;
    if (!along || !calls.takes_rows(*along, request.rows[0]) || !calls.takes_inputs(*along, request.rows[0], request.inputs))
        return py::none();
    return py::cast(combine(calls, *along, request));
}

// (combined_x, the lanes at their source), without gradient.
py::object combine_with_lanes(Calls& calls, py::handle x, py::handle handle, py::handle lanes, py::handle bias, int num_sms) {
    if (is_watched() || !calls.is_ready() || !are_plain({x, lanes, bias})) return py::none();
    const std::optional<Dispatched> along = dispatched_of(calls, handle);
    const Tensor rows = unpacked(x);
    CombineInputs inputs;
    inputs.topk_weight_grads = unpacked(lanes), inputs.bias = unpacked(bias);
    inputs.sums_lanes = true;
    if (!along || !calls.takes_rows(*along, rows) || !calls.takes_inputs(*along, rows, inputs)) return py::none();
    const at::NoGradGuard without_gradients;
    const auto [combined_x, combined_lanes] = calls.or_tell([&] { return calls.combine(*along, rows, nullptr, inputs, num_sms); });
    return py::make_tuple(combined_x, combined_lanes);
}

// (parts, recv_topk_weights, shape, num_rows, memory, call).
py::object dispatch_by_expert(Calls& calls, py::handle x, py::handle topk_idx, py::handle topk_weights, int64_t num_leading,
                              int64_t tokens_per_row) {
    if (is_watched() || !calls.is_ready() || !are_plain({x, topk_idx, topk_weights})) return py::none();
    DispatchRequest request;
    request.out = {unpacked(x), Tensor(), unpacked(topk_idx), unpacked(topk_weights), tokens_per_row};
    request.num_leading = num_leading;
    if (!calls.takes(request.out)) return py::none();
    const DispatchResult made = dispatch(calls, request);
    py::tuple parts(made.parts.size());
    for (size_t i = 0; i < made.parts.size(); ++i) parts[i] = made.parts[i];
    return py::make_tuple(parts, packed(made.in.topk_weights), calls.shape_of(made.handle.num_tokens, true), made.handle.num_rows,
                          made.handle.memory, made.handle.call);
}

// combined_x.
py::object combine_by_expert(Calls& calls, py::handle tensors, py::handle weights, py::handle source_weights, py::handle handle) {
    if (is_watched() || !calls.is_ready() || !are_plain({weights, source_weights})) return py::none();
    CombineRequest request;
    for (const py::handle tensor : py::reinterpret_borrow<py::sequence>(tensors)) {
        if (!THPVariable_CheckExact(tensor.ptr())) return py::none();
        request.rows.push_back(THPVariable_Unpack(tensor.ptr()));
    }
    const std::optional<Dispatched> along = dispatched_of(calls, handle);
    if (!along || request.rows.empty()) return py::none();
    const auto expert_rows = calls.expert_rows_of(request.rows, *along);
    request.inputs.weights = unpacked(weights), request.inputs.source_weights = unpacked(source_weights);
    if (!expert_rows || !calls.takes_inputs(*along, request.rows[0], request.inputs)) return py::none();
    request.expert_rows = &*expert_rows;
    if (request.inputs.source_weights.defined()) request.inputs.tokens_per_row = request.inputs.source_weights.size(0);
    return py::cast(combine(calls, *along, request));
}

std::unique_ptr<Calls> make(py::object shim, int64_t number, int64_t num_ranks, int64_t num_local_experts, int64_t num_topk, int64_t hidden,
                            int64_t num_max_tokens, int num_sms, const at::Device& device, py::object shape_of, py::object current_stream,
                            py::object tell) {
    const Calls::Settings settings{number, num_ranks, num_local_experts, num_topk, hidden, num_max_tokens, num_sms};
    return std::make_unique<Calls>(std::move(shim), settings, device, std::move(shape_of), std::move(current_stream), std::move(tell));
}

std::unique_ptr<LowLatencyCalls> make_low_latency(py::object shim, int64_t num_ranks, int64_t num_local_experts, int64_t num_topk,
                                                  int64_t hidden, int64_t num_max_tokens, int64_t handle_bytes, const Tensor& statistics) {
    const LowLatencyCalls::Settings settings{num_ranks, num_local_experts, num_topk, hidden, num_max_tokens, handle_bytes};
    return std::make_unique<LowLatencyCalls>(std::move(shim), settings, statistics);
}

void bind_gate(py::module_& m) {
    using torch::wrap_pybind_function;
    m.def("set_gate_hooks", &set_gate_hooks, py::kw_only(), py::arg("shim"), py::arg("current_stream"), py::arg("gradients"));
    m.def("gate", wrap_pybind_function(gate), py::arg("logits"), py::arg("num_topk"), py::arg("num_groups"), py::arg("topk_groups"),
          py::arg("group_score_topk"), py::arg("score_function"), py::arg("expert_bias"), py::arg("normalize"),
          py::arg("routed_scaling_factor"), py::arg("mask"), py::arg("index_dtype"), py::arg("check_finite"));
    m.def("gate_full", wrap_pybind_function(gate_full), py::arg("logits"), py::arg("num_topk"), py::arg("num_groups"),
          py::arg("topk_groups"), py::arg("group_score_topk"), py::arg("score_function"), py::arg("expert_bias"), py::arg("normalize"),
          py::arg("routed_scaling_factor"), py::arg("mask"), py::arg("index_dtype"), py::arg("check_finite"), py::arg("dense"),
          py::arg("num_ranks"), py::arg("shares"));
}

}  // namespace
}  // namespace deepep_moe

PYBIND11_MODULE(_torch, m) {
    using namespace deepep_moe;
    m.attr("TORCH_VERSION") = DEEPEP_MOE_TORCH;
    m.attr("SHIM_BYTES") = kShimBytes;
    py::class_<Calls>(m, "Calls")
        .def(py::init(&make), py::kw_only(), py::arg("shim"), py::arg("number"), py::arg("num_ranks"), py::arg("num_local_experts"),
             py::arg("num_topk"), py::arg("hidden"), py::arg("num_max_tokens"), py::arg("num_sms"), py::arg("device"), py::arg("shape_of"),
             py::arg("current_stream"), py::arg("tell"))
        .def("release", &Calls::release)
        .def("dispatch", torch::wrap_pybind_function(dispatch_rows), py::arg("x"), py::arg("x_scales"), py::arg("topk_idx"),
             py::arg("topk_weights"), py::arg("is_expert_layout"), py::arg("expert_alignment"), py::arg("num_recv_rows"),
             py::arg("num_sms"))
        .def("dispatch_cached", torch::wrap_pybind_function(dispatch_along), py::arg("x"), py::arg("x_scales"), py::arg("topk_weights"),
             py::arg("handle"), py::arg("num_sms"))
        .def("combine", torch::wrap_pybind_function(combine_rows), py::arg("x"), py::arg("handle"), py::arg("topk_weights"),
             py::arg("bias"), py::arg("num_sms"))
        .def("combine_with_lanes", torch::wrap_pybind_function(combine_with_lanes), py::arg("x"), py::arg("handle"), py::arg("lanes"),
             py::arg("bias"), py::arg("num_sms"))
        .def("dispatch_by_expert", torch::wrap_pybind_function(dispatch_by_expert), py::arg("x"), py::arg("topk_idx"),
             py::arg("topk_weights"), py::arg("num_leading"), py::arg("tokens_per_row"))
        .def("combine_by_expert", torch::wrap_pybind_function(combine_by_expert), py::arg("parts"), py::arg("weights"),
             py::arg("source_weights"), py::arg("handle"));
    m.def(
        "set_hooks",
        [](py::object plain, py::object pass_failed, py::object dispatch_gradients, py::object combine_gradients) {
            hooks() = {std::move(plain), std::move(pass_failed), std::move(dispatch_gradients), std::move(combine_gradients)};
        },
        py::kw_only(), py::arg("plain"), py::arg("pass_failed"), py::arg("dispatch_gradients"), py::arg("combine_gradients"));
    bind_gate(m);
    m.def("set_expert_hooks", &set_expert_hooks, py::kw_only(), py::arg("shim"), py::arg("current_stream"));
    m.def("grouped_swiglu", torch::wrap_pybind_function(grouped_swiglu), py::arg("x"), py::arg("counts"), py::arg("w1"), py::arg("w2"),
          py::arg("probs"), py::arg("recompute_activation"));
    py::class_<LowLatencyCalls>(m, "LowLatencyCalls")
        .def(py::init(&make_low_latency), py::kw_only(), py::arg("shim"), py::arg("num_ranks"), py::arg("num_local_experts"),
             py::arg("num_topk"), py::arg("hidden"), py::arg("num_max_tokens"), py::arg("handle_bytes"), py::arg("statistics"))
        .def("release", &LowLatencyCalls::release)
        .def("dispatch", torch::wrap_pybind_function(&LowLatencyCalls::dispatch), py::arg("x"), py::arg("topk_idx"),
             py::arg("topk_weights"), py::arg("fp8"), py::arg("scale_format"), py::arg("stream"))
        .def("combine", torch::wrap_pybind_function(&LowLatencyCalls::combine), py::arg("x"), py::arg("state"), py::arg("num_tokens"),
             py::arg("topk_weights"), py::arg("out"), py::arg("wire"), py::arg("stream"));
}

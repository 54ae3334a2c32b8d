// Makes the module `deepep_moe._torch`, which Python calls. Calls with gradients return None if C++ does not take an argument.
#include "torch/functions.h"

namespace deepep_moe {

// These bind other parts of the module, each in its own file.
void bind_dense_routing(py::module_& m);
void bind_experts(py::module_& m);
void bind_gate(py::module_& m);
void bind_low_latency(py::module_& m);

namespace {

// The handle that a `PackedHandle` shows, if it is one of this buffer as its dispatch made it; else null. Python hands the handle itself
// to a call that it has checked.
std::shared_ptr<Handle> handle_in(const Calls& calls, py::handle shown, bool is_checked) {
    if (is_checked) return shown.cast<std::shared_ptr<Handle>>();
    static PyObject* const name = PyUnicode_InternFromString("native");
    const auto attribute = py::reinterpret_steal<py::object>(PyObject_GetAttr(shown.ptr(), name));
    if (!attribute) PyErr_Clear();
    if (!attribute || !py::isinstance<Handle>(attribute)) return nullptr;
    auto handle = attribute.cast<std::shared_ptr<Handle>>();
    return calls.takes_handle(*handle) ? handle : nullptr;
}

// ---- calls with gradients: None where an argument is not what C++ takes. Those that Python has checked have no gradients, and Python
// tells the peers what fails ----

bool may_call(Calls& calls, std::initializer_list<py::handle> tensors, bool is_checked = false) {
    if (is_checked) return true;
    if (is_watched() || calls.is_released() || calls.has_failed() || !are_plain(tensors)) return false;
    calls.look_at_counts();
    return true;
}

// Makes of lanes [num_tokens, lanes], which sums by lanes are given, what the exchange takes: [num_tokens * lanes, 1]. Returns false for
// another shape.
bool make_one_by_one(const Calls& calls, Tensor& lanes) {
    if (!calls.settings.is_by_lane || !lanes.defined()) return true;
    if (!calls.is_here(lanes) || lanes.dim() != 2 || lanes.size(1) != calls.settings.lanes) return false;
    lanes = lanes.reshape({-1, 1});
    return true;
}

std::optional<Received> dispatch_rows(Calls& calls, py::handle x, py::handle x_scales, py::handle topk_idx, py::handle topk_weights,
                                      bool is_expert_layout, int64_t expert_alignment, int64_t num_recv_rows, const Mode& mode) {
    if (!may_call(calls, {x, x_scales, topk_idx, topk_weights}, mode.is_checked)) return std::nullopt;
    DispatchRequest request;
    request.sent = {unpacked(x), unpacked(x_scales), unpacked(topk_idx), unpacked(topk_weights)};
    request.is_expert_layout = is_expert_layout;
    request.expert_alignment = expert_alignment;
    request.num_recv_rows = num_recv_rows;
    request.mode = mode;
    if (mode.is_checked) return calls.dispatch(request.sent, is_expert_layout, expert_alignment, num_recv_rows, mode);
    if (!make_one_by_one(calls, request.sent.topk_idx) || !make_one_by_one(calls, request.sent.topk_weights)) return std::nullopt;
    if (!calls.takes(request.sent) || (calls.settings.is_by_lane && !is_expert_layout)) return std::nullopt;
    if (request.sent.topk_weights.defined() && request.sent.topk_weights.sizes() != request.sent.topk_idx.sizes()) return std::nullopt;
    return dispatch(calls, request);
}

std::optional<Received> dispatch_along(Calls& calls, py::handle x, py::handle x_scales, py::handle topk_weights, py::handle handle,
                                       const OptionalTensor& scaling_weights, const OptionalTensor& scaling_x, const Mode& mode) {
    if (!may_call(calls, {x, x_scales, topk_weights}, mode.is_checked)) return std::nullopt;
    DispatchRequest request;
    request.along = handle_in(calls, handle, mode.is_checked);
    request.sent.x = unpacked(x), request.sent.x_scales = unpacked(x_scales), request.sent.topk_weights = unpacked(topk_weights);
    request.mode = mode;
    if (mode.is_checked) {
        const Scaling scaling{or_none(scaling_weights), or_none(scaling_x)};
        return calls.dispatch_cached(request.along, request.sent, scaling_weights ? &scaling : nullptr, mode);
    }
    if (!make_one_by_one(calls, request.sent.topk_weights)) return std::nullopt;
    if (!request.along || !request.along->has_recv_topk_idx() || !calls.takes_along(*request.along, request.sent)) return std::nullopt;
    return dispatch(calls, request);
}

// Returns all rows of a late dispatch whose rows did not fit, with the gradients of its arguments; None if they fit.
std::optional<Received> settle(Calls& calls, const std::shared_ptr<Handle>& handle) {
    calls.look_at_counts();
    if (handle->late == nullptr) return std::nullopt;
    DispatchRequest request;
    request.along = handle, request.is_late = true;
    request.sent = handle->late->sent;
    return dispatch(calls, request);
}

// With topk_weight_grads there is no gradient, and no weight.
std::optional<Combined> combine_rows(Calls& calls, py::handle x, py::handle handle, py::handle topk_weights, py::handle bias,
                                     py::handle topk_weight_grads, py::handle options, const Mode& mode) {
    if (!may_call(calls, {x, topk_weights, bias, topk_weight_grads}, mode.is_checked)) return std::nullopt;
    const auto along = handle_in(calls, handle, mode.is_checked);
    CombineRequest request;
    request.rows = {unpacked(x)};
    request.inputs = {unpacked(topk_weights), unpacked(bias), unpacked(topk_weight_grads)};
    request.inputs.options = combine_options_of(options);
    request.mode = mode;
    if (mode.is_checked) return calls.combine(*along, request.rows[0], nullptr, request.inputs, mode);
    if (!along || !calls.takes_rows(*along, request.rows[0]) || !calls.takes_inputs(*along, request.rows[0], request.inputs))
        return std::nullopt;
    const at::AutoGradMode with_gradients(at::GradMode::is_enabled() && topk_weight_grads.is_none());
    return combine(calls, *along, request);
}

std::optional<Received> dispatch_by_expert(Calls& calls, py::handle x, py::handle topk_idx, py::handle topk_weights, int64_t num_leading,
                                           int64_t tokens_per_row, const Mode& mode) {
    if (!may_call(calls, {x, topk_idx, topk_weights})) return std::nullopt;
    DispatchRequest request;
    request.sent = {unpacked(x), Tensor(), unpacked(topk_idx), unpacked(topk_weights), tokens_per_row};
    request.num_leading = num_leading;
    request.mode = mode;
    if (!calls.takes(request.sent)) return std::nullopt;
    return dispatch(calls, request);
}

// tensors: the rows of each local expert; or all rows in one tensor, once they are joined.
std::optional<Combined> combine_by_expert(Calls& calls, py::handle tensors, bool are_joined, py::handle weights, py::handle source_weights,
                                          py::handle handle) {
    if (!may_call(calls, {weights, source_weights})) return std::nullopt;
    CombineRequest request;
    for (const py::handle tensor : py::reinterpret_borrow<py::sequence>(tensors)) {
        if (!THPVariable_CheckExact(tensor.ptr())) return std::nullopt;
        request.rows.push_back(THPVariable_Unpack(tensor.ptr()));
    }
    const auto along = handle_in(calls, handle, false);
    if (!along || !along->is_expert_layout || along->expert_alignment != 1 || request.rows.empty()) return std::nullopt;
    const auto expert_rows = are_joined ? std::nullopt : calls.expert_rows_of(request.rows, *along);
    if (expert_rows) {
        request.expert_rows = &*expert_rows;
    } else {
        if (!are_joined && !calls.can_join(request.rows, *along)) return std::nullopt;
        if (!are_joined) request.rows = {calls.or_tell([&] { return calls.joined(request.rows); })};
        if (!calls.takes_rows(*along, request.rows[0])) return std::nullopt;
    }
    request.inputs.weights = unpacked(weights), request.inputs.source_weights = unpacked(source_weights);
    if (!calls.takes_inputs(*along, request.rows[0], request.inputs)) return std::nullopt;
    if (request.inputs.source_weights.defined()) request.inputs.tokens_per_row = request.inputs.source_weights.size(0);
    return combine(calls, *along, request);
}

// ---- what calls are made of ----

std::shared_ptr<Calls> make(py::object owner, int64_t number, int64_t num_topk, int64_t num_max_tokens, int num_sms, int64_t lanes,
                            const std::string& sums, const at::Device& device, py::object tell) {
    auto& exchange = *shim_in<ExchangeShim>(owner.attr("shim")());
    const GpuWorkspaceConfig& sizes = exchange.sizes();
    const Calls::Settings settings{
        .number = number,
        .num_topk = num_topk,
        .num_max_tokens = num_max_tokens,
        .num_sms = num_sms,
        .lanes = lanes,
        .is_by_lane = sums != "ranks",
        .is_fused = sums == "lanes_fma",
        .num_ranks = sizes.num_sources(),
        .num_local_experts = sizes.num_experts / sizes.num_ranks,
        .hidden = sizes.hidden,
        .num_nodes = sizes.num_nodes,
        .num_node_tokens = sizes.num_nodes == 1 ? 0 : sizes.num_max_tokens,
    };
    return std::make_shared<Calls>(std::move(owner), exchange, settings, device, std::move(tell));
}

void bind_handle(py::module_& m) {
    const auto section = [](int i) { return [i](const Handle& self) { return self.section(i); }; };
    py::class_<Handle, std::shared_ptr<Handle>>(m, "Handle")
        .def_readonly("buffer_id", &Handle::buffer_id)
        .def_property_readonly("layout", [](const Handle& self) { return self.is_expert_layout ? "expert" : "rank"; })
        .def_readonly("expert_alignment", &Handle::expert_alignment)
        .def_readonly("num_rows", &Handle::num_rows)
        .def_property_readonly("num_tokens", [](const Handle& self) { return self.shape.num_tokens; })
        .def_readonly("memory", &Handle::memory)
        .def_readonly("call", &Handle::call)
        .def_property_readonly("counts_on_host", [](const Handle& self) { return self.counts_on_host().vec(); })
        .def_property_readonly("num_rows_per_expert_on_host", &Handle::num_rows_per_expert_on_host)
        .def_property_readonly("topk_idx", section(kTopkIdx))
        .def_property_readonly("recv_row_idx", section(kRecvRowIdx))
        .def_property_readonly("recv_counts", section(kRecvCounts))
        .def_property_readonly("num_recv_tokens_per_expert", section(kTokensPerExpert))
        .def_readonly("recv_topk_idx", &Handle::recv_topk_idx)
        .def_property_readonly("is_late", [](const Handle& self) { return self.late != nullptr; })
        .def_property_readonly("is_unchanged", &Handle::is_unchanged)
        .def_property_readonly("has_recv_topk_idx", &Handle::has_recv_topk_idx)
        .def("replaced", &Handle::with)
        .def("emptied", [](const Handle& self) { return self.with({}, {}); });
}

void bind_results(py::module_& m) {
    using torch::wrap_pybind_function;
    py::class_<Mode>(m, "Mode").def(py::init<int, bool, bool, int64_t, bool, bool>(), py::arg("num_sms"), py::arg("is_async"),
                                    py::arg("is_split"), py::arg("layer"), py::arg("is_late") = false, py::arg("is_checked") = false);
    py::class_<Recorded, std::shared_ptr<Recorded>>(m, "Recorded")
        .def(py::init([](const at::Device& device) { return std::make_shared<Recorded>(device); }))
        .def("wait", wrap_pybind_function(&Recorded::wait))
        .def("query", wrap_pybind_function(&Recorded::query));
    py::class_<SecondHalf, std::shared_ptr<SecondHalf>>(m, "SecondHalf").def("finish", wrap_pybind_function(&SecondHalf::finish));
    py::class_<InFlight>(m, "InFlight").def_readonly("second_half", &InFlight::second_half).def_readonly("recorded", &InFlight::recorded);
    py::class_<Received, InFlight>(m, "Received")
        .def_readonly("recv_x", &Received::x)
        .def_readonly("recv_x_scales", &Received::x_scales)
        .def_readonly("recv_topk_weights", &Received::topk_weights)
        .def_readonly("grad_weights", &Received::grad_weights)
        .def_property_readonly("parts", [](const Received& self) { return py::tuple(py::cast(self.parts)); })
        .def_readonly("handle", &Received::handle);
    py::class_<Combined, InFlight>(m, "Combined")
        .def_readonly("combined_x", &Combined::x)
        .def_readonly("topk_weight_grads", &Combined::topk_weight_grads);
}

// Returns the memory at `address` as bytes. The tensor keeps `owner`, whose memory it is.
Tensor bytes_at(uintptr_t address, int64_t num_bytes, const at::Device& device, py::object owner) {
    const auto release = [kept = new py::object(std::move(owner))](void*) {
        if (Py_IsInitialized() == 0) return;  // the process ends
        const py::gil_scoped_acquire gil;
        delete kept;
    };
    return at::from_blob(reinterpret_cast<void*>(address), {num_bytes}, release, at::dtype(at::kByte).device(device), device);
}

void bind_calls(py::module_& m) {
    using torch::wrap_pybind_function;
    py::class_<Calls, std::shared_ptr<Calls>>(m, "Calls")
        .def(py::init(&make), py::kw_only(), py::arg("owner"), py::arg("number"), py::arg("num_topk"), py::arg("num_max_tokens"),
             py::arg("num_sms"), py::arg("lanes"), py::arg("sums"), py::arg("device"), py::arg("tell"))
        .def("release", &Calls::release)
        .def_property_readonly("has_failed", &Calls::has_failed)
        .def_readwrite("is_held", &Calls::is_held)
        .def_property_readonly("can_fuse", &Calls::can_fuse)
        .def_property_readonly("num_handle_numbers", &Calls::num_handle_numbers)
        .def("num_handle_ints",
             [](const Calls& self, const py::object& num_tokens, bool is_expert_layout) -> py::object {  // for PyTorch perhaps a symbol
                 return py::int_(self.shape_of(0, is_expert_layout).starts[kTopkIdx]) + num_tokens * py::int_(self.settings.num_topk);
             })
        .def("handle_of", wrap_pybind_function(&Calls::handle_of))
        .def("dispatch", wrap_pybind_function(dispatch_rows))
        .def("settle", wrap_pybind_function(settle))
        .def("dispatch_cached", wrap_pybind_function(dispatch_along))
        .def("combine", wrap_pybind_function(combine_rows))
        .def("dispatch_by_expert", wrap_pybind_function(dispatch_by_expert))
        .def("combine_by_expert", wrap_pybind_function(combine_by_expert));
    m.def("bytes_at", wrap_pybind_function(bytes_at));
    m.def("call_stream", wrap_pybind_function(call_stream));
}

}  // namespace
}  // namespace deepep_moe

PYBIND11_MODULE(_torch, m) {
    using namespace deepep_moe;
    m.attr("TORCH_VERSION") = DEEPEP_MOE_TORCH;
    m.attr("SHIM_BYTES") = kShimBytes;
    m.def("connect", [](const py::capsule& shim) { kernels = shim_in<const KernelShim>(shim); }, py::arg("shim"));
    bind_handle(m);
    bind_results(m);
    bind_calls(m);
    bind_gate(m);
    bind_dense_routing(m);
    bind_experts(m);
    bind_low_latency(m);
}

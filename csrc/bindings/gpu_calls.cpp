// Bindings of the calls of the GPU library: what tensors and a handle say becomes params, in one step.
#include <optional>

#include "bindings/tensor.h"
#include "cuda/launch.h"
#include "runtime/gpu_communicator.h"

using namespace deepep_moe;

namespace {

const Name kLayout{"layout"}, kAlignment{"expert_alignment"}, kNumRows{"num_rows"}, kCall{"call"};
const Name kTopkIdx{"topk_idx"}, kRecvRowIdx{"recv_row_idx"}, kRecvCounts{"recv_counts"}, kTokensPerExpert{"num_recv_tokens_per_expert"};
const Name kMemory{"memory"}, kStarts{"starts"}, kNumTokens{"num_tokens"}, kNumTopk{"num_topk"};

// What a call reads of a `DispatchHandle`.
struct HandleArg {
    TensorArg topk_idx, recv_row_idx, recv_counts, num_recv_tokens_per_expert, call;
    bool is_expert_layout;
    int expert_alignment;

    explicit HandleArg(py::handle handle) : HandleArg(handle, TensorArg(attribute(handle, kMemory))) {}
    HandleArg(py::handle handle, const TensorArg& memory)
        : call(attribute(handle, kCall)), is_expert_layout(PyUnicode_CompareWithASCIIString(attribute(handle, kLayout).ptr(), "expert") == 0),
          expert_alignment(static_cast<int>(to_int(attribute(handle, kAlignment)))) {
        if (memory.is_there) {
            unpack(handle, memory);
            return;
        }
        topk_idx = TensorArg(attribute(handle, kTopkIdx));
        recv_row_idx = TensorArg(attribute(handle, kRecvRowIdx));
        recv_counts = TensorArg(attribute(handle, kRecvCounts));
        num_recv_tokens_per_expert = TensorArg(attribute(handle, kTokensPerExpert));
    }

    // Of a `PackedHandle`: addresses only, but for topk_idx.
    void unpack(py::handle handle, const TensorArg& memory) {
        const py::object starts = attribute(handle, kStarts);
        TensorArg* const tensors[] = {&topk_idx, &recv_row_idx, &recv_counts, &num_recv_tokens_per_expert};
        for (Py_ssize_t i = 0; i < 4; ++i) tensors[i]->address = memory.address + sizeof(int32_t) * to_int(PyTuple_GetItem(starts.ptr(), i));
        topk_idx.num_rows = to_int(attribute(handle, kNumTokens));
        topk_idx.num_columns = to_int(attribute(handle, kNumTopk));
        topk_idx.element_bytes = sizeof(int32_t);
    }

    int64_t number() const { return *call.as<const int64_t*>(); }  // of the dispatch
    Layout layout() const { return is_expert_layout ? Layout::kExpert : Layout::kRank; }
};

GpuRouting routing_of(const TensorArg& topk_idx) {
    GpuRouting routing{};  // scratch is the communicator's
    routing.topk_idx = topk_idx.as<const void*>();
    routing.token_stride = topk_idx.num_columns;
    routing.lane_stride = 1;
    routing.is_int64 = topk_idx.element_bytes == 8;
    routing.num_tokens = static_cast<int>(topk_idx.num_rows);
    return routing;
}

// Of a call along a handle.
GpuPlanParams cached_plan(const HandleArg& handle) {
    GpuPlanParams plan{};
    plan.routing = routing_of(handle.topk_idx);
    plan.cached = true;
    plan.is_expert_layout = handle.is_expert_layout;
    plan.expert_alignment = 1;
    plan.num_recv_rows_bound = -1;
    return plan;
}

GpuPlanParams fresh_plan(const HandleArg& handle, const MatrixArg& topk_idx, int64_t num_recv_rows) {
    GpuPlanParams plan{};
    plan.routing = routing_of(topk_idx);
    plan.routing.token_stride = topk_idx.row_stride;
    plan.routing.lane_stride = topk_idx.column_stride;
    plan.routing.narrow_topk_idx = handle.topk_idx.as<int32_t*>();
    plan.reports_counts = num_recv_rows < 0;
    plan.is_expert_layout = handle.is_expert_layout;
    plan.expert_alignment = handle.expert_alignment;
    plan.num_recv_rows_bound = num_recv_rows;
    plan.recv_counts = handle.recv_counts.as<int32_t*>();
    plan.num_recv_tokens_per_expert = handle.num_recv_tokens_per_expert.as<int32_t*>();
    return plan;
}

GpuWeighing weighing_of(const TensorArg& weights, const TensorArg& x, const GpuParts* parts, const TensorArg& grad_weights, DType dtype) {
    return {dtype, weights.as<const float*>(), x.as<const std::byte*>(), parts == nullptr ? GpuParts{} : *parts, grad_weights.as<float*>()};
}

// Parts, and the addresses by which tensors are known again.
struct PartsArg : GpuParts {
    uintptr_t address[kMaxParts] = {};  // 0 without rows

    // Are these tensors, once found to be parts, still where they were?
    bool lie_in(py::handle tensors) const {
        const py::object given = owned(PySequence_Fast(tensors.ptr(), "expected tensors"));
        if (PySequence_Fast_GET_SIZE(given.ptr()) != num_parts) return false;
        for (int i = 0; i < num_parts; ++i)
            if (address[i] != 0 && address_of(PySequence_Fast_GET_ITEM(given.ptr(), i)) != address[i]) return false;
        return true;
    }
};

struct GpuDispatchCall {
    GpuPlanParams plan;
    GpuDispatchParams params{};
    Signature signature{};

    // topk_idx: none along a handle, which else is filled. num_recv_rows: -1 without a bound.
    GpuDispatchCall(py::handle handle_memory, const TensorArg& x, const TensorArg& x_scales, const MatrixArg& topk_idx, const MatrixArg& topk_weights,
                    DType dtype, int64_t num_recv_rows) {
        const HandleArg handle(handle_memory);
        const bool cached = !topk_idx.is_there;
        plan = cached ? cached_plan(handle) : fresh_plan(handle, topk_idx, num_recv_rows);
        params.routing = plan.routing;
        params.routing.narrow_topk_idx = nullptr;
        params.cached = cached;
        params.has_lanes = !cached || topk_weights.is_there;
        params.is_expert_layout = handle.is_expert_layout;
        params.expert_alignment = handle.expert_alignment;
        params.row_bytes = x.row_bytes();
        params.scale_bytes = x_scales.is_there ? x_scales.row_bytes() : 0;
        params.num_x_rows = static_cast<int>(x.num_rows);
        params.x = x.as<const std::byte*>();
        params.x_scales = x_scales.as<const std::byte*>();
        params.topk_weights = topk_weights.as<const float*>();
        params.weights_token_stride = topk_weights.row_stride;
        params.weights_lane_stride = topk_weights.column_stride;
        params.recv_counts = handle.recv_counts.as<const int32_t*>();
        params.num_recv_tokens_per_expert = handle.num_recv_tokens_per_expert.as<const int32_t*>();
        params.recv_row_idx = handle.recv_row_idx.as<int32_t*>();
        signature = {cached ? Operation::kCachedDispatch : Operation::kDispatch, dtype, handle.layout(), plan.expert_alignment,
                     cached ? handle.number() : 0, topk_weights.is_there, x_scales.is_there, false};
    }

    // Where rows go. is_guess: as in GpuDispatchParams.
    void receive_into(const TensorArg& recv_x, const TensorArg& recv_x_scales, const TensorArg& recv_topk_idx, const TensorArg& recv_topk_weights, bool is_guess) {
        params.num_rows = recv_x.num_rows;
        params.recv_x = recv_x.as<std::byte*>();
        params.recv_x_scales = recv_x_scales.as<std::byte*>();
        params.recv_topk_idx = recv_topk_idx.as<void*>();
        params.recv_topk_idx_is_int64 = recv_topk_idx.element_bytes == 8;
        params.recv_topk_weights = recv_topk_weights.as<float*>();
        params.is_guess = is_guess;
    }

    // Rows are gradients of rows that were weighed; as GpuWeighing has it.
    void weigh(const TensorArg& weights, const TensorArg& x, const PartsArg* parts, const TensorArg& grad_weights, DType dtype) {
        params.weighing = weighing_of(weights, x, parts, grad_weights, dtype);
    }

    int64_t slot_bytes() const { return GpuSlotLayout(params.row_bytes, params.scale_bytes).bytes; }
};

// The rows of each local expert, of a dispatch without padding, as `tensors` hold them; None where kernels cannot read them there: where there
// are too many, or they are not alike, contiguous and [1, ..., num_rows, hidden] of whole pieces. Callers keep the tensors alive.
std::optional<PartsArg> parts_of(py::handle handle, py::handle tensors, int64_t num_experts, int64_t hidden) {
    static const Name kDtype{"dtype"}, kGetDevice{"get_device"}, kIsContiguous{"is_contiguous"};
    const py::object given = owned(PySequence_Fast(tensors.ptr(), "expected tensors"));
    const TensorArg call(attribute(handle, kCall));
    const int64_t num_parts = PySequence_Fast_GET_SIZE(given.ptr());
    if (num_parts != num_experts || num_parts > kMaxParts || num_parts >= call.num_rows) return std::nullopt;
    const int64_t* counts = call.as<const int64_t*>() + call.num_rows - num_parts;  // of the last experts
    const py::handle first = PySequence_Fast_GET_ITEM(given.ptr(), 0);
    if (!PyObject_HasAttr(first.ptr(), kDataPtr.text)) return std::nullopt;  // no tensor
    const py::object dtype = attribute(first, kDtype);
    const int64_t device = to_int(called(first, kGetDevice)), element_bytes = to_int(attribute(first, kItemsize));
    const int num_dims = TensorArg(first, element_bytes).num_dims;
    PartsArg parts{};
    int64_t num_rows = 0;
    for (int64_t i = 0; i < num_parts; ++i) {
        const py::handle tensor = PySequence_Fast_GET_ITEM(given.ptr(), i);
        if (Py_TYPE(tensor.ptr()) != Py_TYPE(first.ptr())) return std::nullopt;
        const TensorArg part(tensor, element_bytes);
        const bool is_alike = part.num_dims == num_dims && attribute(tensor, kDtype).is(dtype) && to_int(called(tensor, kGetDevice)) == device;
        const bool has_shape = part.num_columns == hidden && part.inner_rows == counts[i] && part.num_leading == 1;
        if (!is_alike || !has_shape || part.row_bytes() % kRowAlignment != 0 || part.address % kRowAlignment != 0) return std::nullopt;
        if (called(tensor, kIsContiguous).ptr() != Py_True) return std::nullopt;
        parts.address[i] = part.address;
        parts.first_row[i] = static_cast<int>(num_rows);
        parts.rows[i] = part.address - num_rows * part.row_bytes();
        num_rows += part.num_rows;
    }
    parts.num_parts = static_cast<int>(num_parts);
    return num_rows == to_int(attribute(handle, kNumRows)) ? std::optional(parts) : std::nullopt;
}

struct GpuCombineCall {
    GpuPlanParams plan;
    GpuCombineParams params{};
    Signature signature{};

    // is_sent_by_copies: by copy engines, which take rows from the outbox.
    GpuCombineCall(py::handle handle_object, const TensorArg& x, const PartsArg* parts, const TensorArg& weights, const TensorArg& bias, const TensorArg& lane_values,
                   const TensorArg& source_weights, const TensorArg& combined_x, const TensorArg& combined_lane_values, DType dtype,
                   bool is_sent_by_copies) {
        const HandleArg handle(handle_object);
        const int64_t num_rows = parts == nullptr ? x.num_rows : to_int(attribute(handle_object, kNumRows));
        plan = cached_plan(handle);
        params.routing = plan.routing;
        params.is_expert_layout = handle.is_expert_layout;
        params.has_lane_values = lane_values.is_there;
        params.dtype = dtype;
        params.num_rows = num_rows;
        params.recv_counts = handle.recv_counts.as<const int32_t*>();
        params.recv_row_idx = handle.recv_row_idx.as<const int32_t*>();
        params.x = x.as<const std::byte*>();
        if (parts != nullptr) params.parts = *parts;
        params.weights = weights.as<const float*>();
        params.bias = bias.as<const std::byte*>();
        params.lane_values = lane_values.as<const float*>();
        params.repeats = combined_x.num_rows == 0 ? 1 : static_cast<int>(handle.topk_idx.num_rows / combined_x.num_rows);
        params.source_weights = source_weights.as<const float*>();
        params.combined_x = combined_x.as<std::byte*>();
        params.combined_lane_values = combined_lane_values.as<float*>();
        params.direct = !handle.is_expert_layout && !weights.is_there && !is_sent_by_copies && num_rows > 0 && lane_values.address % kRowAlignment == 0;
        params.context.config.num_topk = static_cast<int>(handle.topk_idx.num_columns);  // for `tail_bytes`
        row_bytes = x.row_bytes();
        signature = {Operation::kCombine, dtype, handle.layout(), 1, handle.number(), false, false, lane_values.is_there};
    }

    int64_t slot_bytes() const { return GpuSlotLayout(row_bytes, params.tail_bytes()).bytes; }
    int64_t row_bytes = 0;
};

// grad_x and grad_weights as GpuWeighParams has them.
void weigh_backward(const TensorArg& grad, const TensorArg& x, const TensorArg& weights, const TensorArg& grad_x, const TensorArg& grad_weights,
                    DType dtype, int device, uintptr_t stream) {
    const DeviceGuard guard(device);
    launch_weigh_backward({grad.num_rows, grad.row_bytes(), grad.as<const std::byte*>(), grad_x.as<std::byte*>(),
                           weighing_of(weights, x, nullptr, grad_weights, dtype)},
                          reinterpret_cast<void*>(stream));
}

}  // namespace

void bind_gpu_calls(py::module_& m, py::class_<GpuCommunicator>& communicator) {
    using Released = py::call_guard<py::gil_scoped_release>;
    py::class_<GpuDispatchCall>(m, "GpuDispatchCall")
        .def(py::init<py::handle, const TensorArg&, const TensorArg&, const MatrixArg&, const MatrixArg&, DType, int64_t>(), py::arg("handle"), py::arg("x"),
             py::arg("x_scales"), py::arg("topk_idx"), py::arg("topk_weights"), py::arg("dtype"), py::arg("num_recv_rows") = -1)
        .def("receive_into", &GpuDispatchCall::receive_into, py::arg("recv_x"), py::arg("recv_x_scales"), py::arg("recv_topk_idx"),
             py::arg("recv_topk_weights"), py::arg("is_guess"))
        .def("weigh", &GpuDispatchCall::weigh, py::arg("weights"), py::arg("x"), py::arg("parts"), py::arg("grad_weights"), py::arg("dtype"))
        .def_property_readonly("slot_bytes", &GpuDispatchCall::slot_bytes);
    py::class_<GpuCombineCall>(m, "GpuCombineCall")
        .def(py::init<py::handle, const TensorArg&, const PartsArg*, const TensorArg&, const TensorArg&, const TensorArg&, const TensorArg&, const TensorArg&, const TensorArg&, DType, bool>(),
             py::arg("handle"), py::arg("x"), py::arg("parts"), py::arg("weights"), py::arg("bias"), py::arg("lane_values"), py::arg("source_weights"), py::arg("combined_x"),
             py::arg("combined_lane_values"), py::arg("dtype"), py::arg("is_sent_by_copies"))
        .def_property_readonly("slot_bytes", &GpuCombineCall::slot_bytes);
    py::class_<GpuCounts>(m, "GpuCounts")
        .def_readonly("num_recv_tokens", &GpuCounts::num_recv_tokens)
        .def_readonly("num_rows", &GpuCounts::num_rows);
    py::class_<PartsArg>(m, "GpuParts")
        .def_static("of", &parts_of, py::arg("handle"), py::arg("tensors"), py::arg("num_experts"), py::arg("hidden"))
        .def("lie_in", &PartsArg::lie_in, py::arg("tensors"));
    m.def("gpu_weigh_backward", &weigh_backward, py::arg("grad"), py::arg("x"), py::arg("weights"), py::arg("grad_x"), py::arg("grad_weights"), py::arg("dtype"),
          py::arg("device"), py::arg("stream"));
    communicator
        .def("plan", [](GpuCommunicator& self, const GpuDispatchCall& call, uintptr_t stream) { self.plan(call.plan, call.signature, stream); },
             py::arg("call"), py::arg("stream"), Released())
        .def("plan", [](GpuCommunicator& self, const GpuCombineCall& call, uintptr_t stream) { self.plan(call.plan, call.signature, stream); },
             py::arg("call"), py::arg("stream"), Released())
        .def("wait_counts", [](GpuCommunicator& self, uintptr_t numbers) { return self.wait_counts(reinterpret_cast<int64_t*>(numbers)); },
             py::arg("numbers"), Released())
        .def("dispatch", [](GpuCommunicator& self, const GpuDispatchCall& call, int num_sms, uintptr_t stream) { self.dispatch(call.params, num_sms, stream); },
             py::arg("call"), py::arg("num_sms"), py::arg("stream"), Released())
        .def("combine", [](GpuCommunicator& self, const GpuCombineCall& call, int num_sms, uintptr_t stream) { self.combine(call.params, num_sms, true, stream); },
             py::arg("call"), py::arg("num_sms"), py::arg("stream"), Released())
        .def("start_dispatch", [](GpuCommunicator& self, const GpuDispatchCall& call, int num_sms, uintptr_t stream) { self.start_dispatch(call.params, num_sms, stream); },
             py::arg("call"), py::arg("num_sms"), py::arg("stream"), Released())
        .def("start_combine", [](GpuCommunicator& self, const GpuCombineCall& call, int num_sms, uintptr_t stream) { self.start_combine(call.params, num_sms, stream); },
             py::arg("call"), py::arg("num_sms"), py::arg("stream"), Released())
        .def("end_dispatch", [](GpuCommunicator& self, const GpuDispatchCall& call, uintptr_t stream) { self.end_dispatch(call.params, stream); },
             py::arg("call"), py::arg("stream"), Released())
        .def("end_combine", [](GpuCommunicator& self, const GpuCombineCall& call, uintptr_t stream) { self.end_combine(call.params, stream); },
             py::arg("call"), py::arg("stream"), Released());
}

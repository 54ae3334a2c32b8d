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

HandleArg handle_arg(py::handle handle) {
    HandleArg arg;
    arg.call = tensor_arg(attribute(handle, kCall)).as<const int64_t*>();
    arg.is_expert_layout = PyUnicode_CompareWithASCIIString(attribute(handle, kLayout).ptr(), "expert") == 0;
    arg.expert_alignment = static_cast<int>(to_int(attribute(handle, kAlignment)));
    arg.num_rows = to_int(attribute(handle, kNumRows));
    const TensorArg memory = tensor_arg(attribute(handle, kMemory));
    if (memory.is_there) {
        const py::object starts = attribute(handle, kStarts);
        int64_t sections[4];
        for (Py_ssize_t i = 0; i < 4; ++i) sections[i] = to_int(PyTuple_GetItem(starts.ptr(), i));
        arg.unpack(memory.address, sections, to_int(attribute(handle, kNumTokens)), to_int(attribute(handle, kNumTopk)));
        return arg;
    }
    arg.topk_idx = tensor_arg(attribute(handle, kTopkIdx));
    arg.recv_row_idx = tensor_arg(attribute(handle, kRecvRowIdx));
    arg.recv_counts = tensor_arg(attribute(handle, kRecvCounts));
    arg.num_recv_tokens_per_expert = tensor_arg(attribute(handle, kTokensPerExpert));
    return arg;
}

// Are these tensors, once found to be parts, still where they were?
bool lie_in(const PartsArg& parts, py::handle tensors) {
    const py::object given = owned(PySequence_Fast(tensors.ptr(), "expected tensors"));
    if (PySequence_Fast_GET_SIZE(given.ptr()) != parts.num_parts) return false;
    for (int i = 0; i < parts.num_parts; ++i)
        if (parts.address[i] != 0 && address_of(PySequence_Fast_GET_ITEM(given.ptr(), i)) != parts.address[i]) return false;
    return true;
}

// The rows of each local expert as `tensors` hold them, where those are parts (`deepep_moe::parts_of`) and contiguous tensors of one kind;
// else None. Callers keep the tensors alive.
std::optional<PartsArg> parts_in(py::handle handle, py::handle tensors, int64_t num_experts, int64_t hidden) {
    static const Name kDtype{"dtype"}, kGetDevice{"get_device"}, kIsContiguous{"is_contiguous"};
    const py::object given = owned(PySequence_Fast(tensors.ptr(), "expected tensors"));
    const TensorArg call = tensor_arg(attribute(handle, kCall));
    const int64_t num_parts = PySequence_Fast_GET_SIZE(given.ptr());
    if (num_parts != num_experts || num_parts > kMaxParts || num_parts >= call.num_rows) return std::nullopt;
    const py::handle first = PySequence_Fast_GET_ITEM(given.ptr(), 0);
    if (!PyObject_HasAttr(first.ptr(), kDataPtr.text)) return std::nullopt;  // no tensor
    const py::object dtype = attribute(first, kDtype);
    const int64_t device = to_int(called(first, kGetDevice)), element_bytes = to_int(attribute(first, kItemsize));
    TensorArg parts[kMaxParts];
    for (int64_t i = 0; i < num_parts; ++i) {
        const py::handle tensor = PySequence_Fast_GET_ITEM(given.ptr(), i);
        if (Py_TYPE(tensor.ptr()) != Py_TYPE(first.ptr())) return std::nullopt;
        parts[i] = tensor_arg_of(tensor, element_bytes);
        if (!attribute(tensor, kDtype).is(dtype) || to_int(called(tensor, kGetDevice)) != device) return std::nullopt;
        if (called(tensor, kIsContiguous).ptr() != Py_True) return std::nullopt;
    }
    const int64_t* counts = call.as<const int64_t*>() + call.num_rows - num_parts;  // of the last experts
    return parts_of({parts, static_cast<size_t>(num_parts)}, counts, hidden, to_int(attribute(handle, kNumRows)));
}

// grad_x and grad_weights as GpuWeighParams has them.
void weigh_backward(const TensorArg& grad, const TensorArg& x, const TensorArg& weights, const TensorArg& grad_x,
                    const TensorArg& grad_weights, DType dtype, int device, uintptr_t stream) {
    const DeviceGuard guard(device);
    launch_weigh_backward({grad.num_rows, grad.row_bytes(), grad.as<const std::byte*>(), grad_x.as<std::byte*>(),
                           weighing_of(weights, x, nullptr, grad_weights, dtype)},
                          reinterpret_cast<void*>(stream));
}

// ---- the steps of a call ----

template <class Call>
void plan(GpuCommunicator& self, const Call& call, uintptr_t stream) {
    const GpuCommunicator::Step step(self);
    self.plan(call.plan, call.signature, stream);
}
GpuCounts wait_counts(GpuCommunicator& self, uintptr_t numbers) {
    const GpuCommunicator::Step step(self);
    return self.wait_counts(reinterpret_cast<int64_t*>(numbers));
}

void dispatch(GpuCommunicator& self, const GpuDispatchCall& call, int num_sms, uintptr_t stream) {
    const GpuCommunicator::Step step(self);
    self.dispatch(call.params, num_sms, stream);
}
void abandon(GpuCommunicator& self) {
    const GpuCommunicator::Step step(self);
    self.abandon();
}
void start_dispatch(GpuCommunicator& self, const GpuDispatchCall& call, int num_sms, uintptr_t stream) {
    const GpuCommunicator::Step step(self);
    self.start_dispatch(call.params, num_sms, stream);
}
void end_dispatch(GpuCommunicator& self, const GpuDispatchCall& call, uintptr_t stream) {
    const GpuCommunicator::Step step(self);
    self.end_dispatch(call.params, stream);
}

void combine(GpuCommunicator& self, const GpuCombineCall& call, int num_sms, uintptr_t stream) {
    const GpuCommunicator::Step step(self);
    self.combine(call.params, num_sms, true, stream);
}
void start_combine(GpuCommunicator& self, const GpuCombineCall& call, int num_sms, uintptr_t stream) {
    const GpuCommunicator::Step step(self);
    self.start_combine(call.params, num_sms, stream);
}
void end_combine(GpuCommunicator& self, const GpuCombineCall& call, uintptr_t stream) {
    const GpuCommunicator::Step step(self);
    self.end_combine(call.params, stream);
}

void bind_steps(py::class_<GpuCommunicator, Unlocked<GpuCommunicator>>& communicator) {
    const py::arg call("call"), num_sms("num_sms"), stream("stream");
    const py::call_guard<py::gil_scoped_release> released;
    communicator.def("plan", plan<GpuDispatchCall>, call, stream, released)
        .def("plan", plan<GpuCombineCall>, call, stream, released)
        .def("wait_counts", wait_counts, py::arg("numbers"), released)
        .def("abandon", abandon, released)
        .def("dispatch", dispatch, call, num_sms, stream, released)
        .def("start_dispatch", start_dispatch, call, num_sms, stream, released)
        .def("end_dispatch", end_dispatch, call, stream, released)
        .def("combine", combine, call, num_sms, stream, released)
        .def("start_combine", start_combine, call, num_sms, stream, released)
        .def("end_combine", end_combine, call, stream, released)
        .def("calls", [](GpuCommunicator& self) { return py::capsule(static_cast<GpuCalls*>(&self.guarded), kGpuCallsName); })
        .def("raise_failure", [](GpuCommunicator& self) { self.guarded.raise_failure(); });
}

void bind_calls(py::module_& m) {
    py::class_<GpuDispatchCall>(m, "GpuDispatchCall")
        .def(py::init([](py::handle handle, const TensorArg& x, const TensorArg& x_scales, const MatrixArg& topk_idx,
                         const MatrixArg& topk_weights, DType dtype, int64_t num_recv_rows) {
                 return GpuDispatchCall(handle_arg(handle), x, x_scales, topk_idx, topk_weights, dtype, num_recv_rows);
             }),
             py::arg("handle"), py::arg("x"), py::arg("x_scales"), py::arg("topk_idx"), py::arg("topk_weights"), py::arg("dtype"),
             py::arg("num_recv_rows") = -1)
        .def("receive_into", &GpuDispatchCall::receive_into, py::arg("recv_x"), py::arg("recv_x_scales"), py::arg("recv_topk_idx"),
             py::arg("recv_topk_weights"), py::arg("is_guess"))
        .def(
            "weigh",
            [](GpuDispatchCall& self, const TensorArg& weights, const TensorArg& x, const PartsArg* parts, const TensorArg& grad_weights,
               DType dtype) { self.params.weighing = weighing_of(weights, x, parts, grad_weights, dtype); },
            py::arg("weights"), py::arg("x"), py::arg("parts"), py::arg("grad_weights"), py::arg("dtype"))
        .def_property_readonly("slot_bytes", &GpuDispatchCall::slot_bytes);
    py::class_<GpuCombineCall>(m, "GpuCombineCall")
        .def(py::init([](py::handle handle, const TensorArg& x, const PartsArg* parts, const TensorArg& weights, const TensorArg& bias,
                         const TensorArg& lane_values, const TensorArg& source_weights, const TensorArg& combined_x,
                         const TensorArg& combined_lane_values, DType dtype, bool is_sent_by_copies) {
                 return GpuCombineCall(handle_arg(handle), x, parts, weights, bias, lane_values, source_weights, combined_x,
                                       combined_lane_values, dtype, is_sent_by_copies);
             }),
             py::arg("handle"), py::arg("x"), py::arg("parts"), py::arg("weights"), py::arg("bias"), py::arg("lane_values"),
             py::arg("source_weights"), py::arg("combined_x"), py::arg("combined_lane_values"), py::arg("dtype"),
             py::arg("is_sent_by_copies"))
        .def_property_readonly("slot_bytes", &GpuCombineCall::slot_bytes);
}

}  // namespace

void bind_gpu_calls(py::module_& m, py::class_<GpuCommunicator, Unlocked<GpuCommunicator>>& communicator) {
    bind_calls(m);
    py::class_<RowGuess>(m, "RowGuess")
        .def(py::init())
        .def("room", &RowGuess::room)
        .def("remember", &RowGuess::remember, py::arg("num_rows"));
    m.attr("GPU_CALLS_BYTES") = kGpuCallsBytes;
    py::class_<GpuCounts>(m, "GpuCounts")
        .def_readonly("num_recv_tokens", &GpuCounts::num_recv_tokens)
        .def_readonly("num_rows", &GpuCounts::num_rows);
    py::class_<PartsArg>(m, "GpuParts")
        .def_static("of", &parts_in, py::arg("handle"), py::arg("tensors"), py::arg("num_experts"), py::arg("hidden"))
        .def("lie_in", &lie_in, py::arg("tensors"));
    m.def("gpu_weigh_backward", &weigh_backward, py::arg("grad"), py::arg("x"), py::arg("weights"), py::arg("grad_x"),
          py::arg("grad_weights"), py::arg("dtype"), py::arg("device"), py::arg("stream"));
    bind_steps(communicator);
}

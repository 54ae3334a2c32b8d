// Bindings of the calls of the GPU library: what tensors and a handle say becomes params, in one step.
#include <optional>

#include "bindings/handle.h"
#include "cuda/launch.h"
#include "runtime/nvlink/device.h"
#include "runtime/nvlink/guarded.h"

using namespace deepep_moe;

namespace {

// Are these tensors, once found to be expert_rows, still where they were?
bool lie_in(const ExpertRowsArg& expert_rows, py::handle tensors) {
    const py::object given = owned(PySequence_Fast(tensors.ptr(), "expected tensors"));
    if (PySequence_Fast_GET_SIZE(given.ptr()) != expert_rows.num_tensors) return false;
    for (int i = 0; i < expert_rows.num_tensors; ++i)
        if (expert_rows.address[i] != 0 && address_of(PySequence_Fast_GET_ITEM(given.ptr(), i)) != expert_rows.address[i]) return false;
    return true;
}

// The rows of each local expert as `tensors` hold them, where those are expert_rows (`deepep_moe::expert_rows_of`) and contiguous tensors
// of one kind; else None. Callers keep the tensors alive.
std::optional<ExpertRowsArg> expert_rows_in(py::handle handle, py::handle tensors, int64_t num_experts, int64_t hidden) {
    static const Name kDtype{"dtype"}, kGetDevice{"get_device"}, kIsContiguous{"is_contiguous"};
    const py::object given = owned(PySequence_Fast(tensors.ptr(), "expected tensors"));
    const TensorArg call = tensor_arg(attribute(handle, kCall));
    const int64_t num_tensors = PySequence_Fast_GET_SIZE(given.ptr());
    if (num_tensors != num_experts || num_tensors > kMaxExpertTensors || num_tensors >= call.num_rows) return std::nullopt;
    const py::handle first = PySequence_Fast_GET_ITEM(given.ptr(), 0);
    if (!PyObject_HasAttr(first.ptr(), kDataPtr.text)) return std::nullopt;  // no tensor
    const py::object dtype = attribute(first, kDtype);
    const int64_t device = to_int(called(first, kGetDevice)), element_bytes = to_int(attribute(first, kItemsize));
    TensorArg expert_rows[kMaxExpertTensors];
    for (int64_t i = 0; i < num_tensors; ++i) {
        const py::handle tensor = PySequence_Fast_GET_ITEM(given.ptr(), i);
        if (Py_TYPE(tensor.ptr()) != Py_TYPE(first.ptr())) return std::nullopt;
        expert_rows[i] = tensor_arg_of(tensor, element_bytes);
        if (!attribute(tensor, kDtype).is(dtype) || to_int(called(tensor, kGetDevice)) != device) return std::nullopt;
        if (called(tensor, kIsContiguous).ptr() != Py_True) return std::nullopt;
    }
    const int64_t* counts = call.as<const int64_t*>() + call.num_rows - num_tensors;  // of the last experts
    return expert_rows_of({expert_rows, static_cast<size_t>(num_tensors)}, counts, hidden, to_int(attribute(handle, kNumRows)));
}

// grad_x and grad_weights as GpuScaleRowsParams has them.
void scale_rows_backward(const TensorArg& grad, const TensorArg& x, const TensorArg& weights, const TensorArg& grad_x,
                         const TensorArg& grad_weights, DType dtype, int device, uintptr_t stream) {
    const DeviceGuard guard(device);
    launch_scale_rows_backward({grad.num_rows, grad.row_bytes(), grad.as<const std::byte*>(), grad_x.as<std::byte*>(),
                                scaling_of(weights, x, nullptr, grad_weights, dtype)},
                               reinterpret_cast<void*>(stream));
}

// ---- calls ----

int64_t dispatch(NvlinkExchange& self, GpuDispatchCall& call, int num_sms, bool is_split, uintptr_t stream, const TensorArg& numbers,
                 const py::function& allocate) {
    if (numbers.num_rows != self.num_handle_numbers()) throw std::invalid_argument("numbers of another buffer's handle");
    const py::gil_scoped_release released;
    return self.dispatch(call, {num_sms, is_split, stream}, numbers.as<int64_t*>(), [&](int64_t num_rows, bool is_guess) {
        const py::gil_scoped_acquire gil;
        allocate(num_rows, is_guess);
    });
}

void bind_exchange_calls(py::class_<NvlinkExchange, Unlocked<NvlinkExchange>>& exchange) {
    const py::arg call("call"), num_sms("num_sms"), is_split("is_split"), stream("stream");
    const py::call_guard<py::gil_scoped_release> released;
    exchange.def("dispatch", &dispatch, call, num_sms, is_split, stream, py::arg("numbers"), py::arg("allocate"))
        .def(
            "dispatch_cached",
            [](NvlinkExchange& self, const GpuDispatchCall& call, int num_sms, bool is_split, uintptr_t stream) {
                self.dispatch_cached(call, {num_sms, is_split, stream});
            },
            call, num_sms, is_split, stream, released)
        .def(
            "combine",
            [](NvlinkExchange& self, const GpuCombineCall& call, int num_sms, bool is_split, uintptr_t stream) {
                self.combine(call, {num_sms, is_split, stream});
            },
            call, num_sms, is_split, stream, released)
        .def("end_dispatch", &NvlinkExchange::end_dispatch, call, stream, released)
        .def("enter", &NvlinkExchange::enter, call, stream, released)
        .def("end_combine", &NvlinkExchange::end_combine, call, stream, released);
}

void bind_calls(py::module_& m) {
    py::class_<GpuDispatchCall>(m, "GpuDispatchCall")
        .def(py::init([](const HandleArg& handle, const TensorArg& x, const TensorArg& x_scales, const MatrixArg& topk_idx,
                         const MatrixArg& topk_weights, DType dtype, int64_t num_recv_rows) {
                 return GpuDispatchCall(handle, x, x_scales, topk_idx, topk_weights, dtype, num_recv_rows);
             }),
             py::arg("handle"), py::arg("x"), py::arg("x_scales"), py::arg("topk_idx"), py::arg("topk_weights"), py::arg("dtype"),
             py::arg("num_recv_rows") = -1)
        .def("receive_into", &GpuDispatchCall::receive_into, py::arg("recv_x"), py::arg("recv_x_scales"), py::arg("recv_topk_idx"),
             py::arg("recv_topk_weights"), py::arg("is_guess"))
        .def(
            "scale",
            [](GpuDispatchCall& self, const TensorArg& weights, const TensorArg& x, const ExpertRowsArg* expert_rows,
               const TensorArg& grad_weights,
               DType dtype) { self.params.scaling = scaling_of(weights, x, expert_rows, grad_weights, dtype); },
            py::arg("weights"), py::arg("x"), py::arg("expert_rows"), py::arg("grad_weights"), py::arg("dtype"));
    py::class_<GpuCombineCall>(m, "GpuCombineCall")
        .def(py::init([](const HandleArg& handle, const TensorArg& x, const ExpertRowsArg* expert_rows, const TensorArg& weights,
                         const TensorArg& bias, const TensorArg& topk_weight_grads, const TensorArg& source_weights,
                         const TensorArg& combined_x, const TensorArg& combined_topk_weight_grads, DType dtype, bool sums_lanes) {
                 return GpuCombineCall(handle, x, expert_rows, weights, bias, topk_weight_grads, source_weights, combined_x,
                                       combined_topk_weight_grads, dtype, sums_lanes);
             }),
             py::arg("handle"), py::arg("x"), py::arg("expert_rows"), py::arg("weights"), py::arg("bias"), py::arg("topk_weight_grads"),
             py::arg("source_weights"), py::arg("combined_x"), py::arg("combined_topk_weight_grads"), py::arg("dtype"),
             py::arg("sums_lanes"));
}

void bind_shim(py::module_& m, py::class_<NvlinkExchange, Unlocked<NvlinkExchange>>& exchange) {
    m.attr("SHIM_BYTES") = kShimBytes;
    py::class_<GuardedExchange>(m, "ExchangeShim")
        .def("capsule", [](GuardedExchange& self) { return py::capsule(static_cast<ExchangeShim*>(&self), kShimName); })
        .def_static("raise_failure", &GuardedExchange::raise_failure);
    exchange.def("shim", [](NvlinkExchange& self) { return std::make_unique<GuardedExchange>(self); }, py::keep_alive<0, 1>());
}

}  // namespace

void bind_nvlink_calls(py::module_& m, py::class_<NvlinkExchange, Unlocked<NvlinkExchange>>& exchange) {
    bind_calls(m);
    py::class_<ExpertRowsArg>(m, "ExpertRows")
        .def_static("of", &expert_rows_in, py::arg("handle"), py::arg("tensors"), py::arg("num_experts"), py::arg("hidden"))
        .def("lie_in", &lie_in, py::arg("tensors"));
    m.def("gpu_scale_rows_backward", &scale_rows_backward, py::arg("grad"), py::arg("x"), py::arg("weights"), py::arg("grad_x"),
          py::arg("grad_weights"), py::arg("dtype"), py::arg("device"), py::arg("stream"));
    bind_exchange_calls(exchange);
    bind_shim(m, exchange);
}

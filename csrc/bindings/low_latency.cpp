// Bindings of low-latency calls: the communicator of processes, and the params that GPUs take as well.
#include <limits>

#include "bindings/bindings.h"
#include "runtime/shm/low_latency.h"

using namespace deepep_moe;

namespace {

template <class Params>
py::class_<Params> params_class(py::module_& m, const char* name) {
    py::class_<Params> cls(m, name);
    cls.def(py::init([] { return Params{}; }))
        .def_property(
            "dtype", [](const Params& self) { return self.what.dtype; }, [](Params& self, DType value) { self.what.dtype = value; })
        .def_property(
            "fp8", [](const Params& self) { return self.what.fp8; }, [](Params& self, bool value) { self.what.fp8 = value; })
        .def_readwrite("num_tokens", &Params::num_tokens);
    pointer_field(cls, "x", &Params::x);
    pointer_field(cls, "handle", &Params::handle);
    pointer_field(cls, "statistics", &Params::statistics);
    return cls;
}

void bind_params(py::module_& m) {
    using Dispatch = LowLatencyDispatchParams;
    auto dispatch = params_class<Dispatch>(m, "LowLatencyDispatchParams");
    dispatch
        .def_property(
            "is_rounded", [](const Dispatch& self) { return self.what.is_rounded; },
            [](Dispatch& self, bool value) { self.what.is_rounded = value; })
        .def_property(
            "has_weights", [](const Dispatch& self) { return self.what.has_weights; },
            [](Dispatch& self, bool value) { self.what.has_weights = value; })
        .def_readwrite("is_int64", &Dispatch::is_int64);
    pointer_field(dispatch, "topk_idx", &Dispatch::topk_idx);
    pointer_field(dispatch, "topk_weights", &Dispatch::topk_weights);
    pointer_field(dispatch, "recv_x", &Dispatch::recv_x);
    pointer_field(dispatch, "recv_x_scales", &Dispatch::recv_x_scales);
    pointer_field(dispatch, "num_recv_tokens_per_expert", &Dispatch::num_recv_tokens_per_expert);

    auto combine = params_class<LowLatencyCombineParams>(m, "LowLatencyCombineParams");
    pointer_field(combine, "call", &LowLatencyCombineParams::call);
    pointer_field(combine, "combined_x", &LowLatencyCombineParams::combined_x);
}

std::unique_ptr<ShmLowLatency> make(int num_ranks, int rank, int num_experts, int num_topk, int hidden, int64_t num_max_tokens,
                                    double timeout_s, bool mask_stalled) {
    auto made = std::make_unique<ShmLowLatency>(LowLatencyConfig{num_ranks, num_experts, num_topk, hidden, num_max_tokens}, rank, timeout_s,
                                                mask_stalled);
    made->set_poll(poll_signals);
    return made;
}

}  // namespace

void bind_low_latency(py::module_& m) {
    using Released = py::call_guard<py::gil_scoped_release>;
    m.attr("LOW_LATENCY_MAX_TOKENS") = std::numeric_limits<uint16_t>::max();
    m.attr("LOW_LATENCY_MAX_LOCAL_EXPERTS") = std::numeric_limits<int16_t>::max();
    m.attr("LOW_LATENCY_MAX_RANKS") = kLowLatencyMaxRanks;
    bind_params(m);
    py::class_<ShmLowLatency>(m, "ShmLowLatency")
        .def(py::init(&make), py::kw_only(), py::arg("num_ranks"), py::arg("rank"), py::arg("num_experts"), py::arg("num_topk"),
             py::arg("hidden"), py::arg("num_max_tokens"), py::arg("timeout_s"), py::arg("mask_stalled"))
        .def_property_readonly("workspace_bytes", &ShmLowLatency::workspace_bytes)
        .def_property_readonly("handle_bytes", &ShmLowLatency::handle_bytes)
        .def_property_readonly("path", &ShmLowLatency::path)
        .def_property_readonly("masks", &ShmLowLatency::masks)
        .def("connect", &ShmLowLatency::connect, py::arg("paths"), py::arg("pids"))
        .def("seal", &ShmLowLatency::seal)
        .def("dispatch", &ShmLowLatency::dispatch, py::arg("params"), py::arg("sends"), py::arg("receives"), Released())
        .def("combine", &ShmLowLatency::combine, py::arg("params"), py::arg("sends"), py::arg("receives"), Released())
        .def("mask", &ShmLowLatency::mask, py::arg("rank"), py::arg("masked"), Released())
        .def("rejoin", &ShmLowLatency::rejoin, Released())
        .def("refuse", &ShmLowLatency::refuse, py::arg("reason"), Released())
        .def("check", [](const ShmLowLatency&) {});  // of a GPU's: what it has reported
}

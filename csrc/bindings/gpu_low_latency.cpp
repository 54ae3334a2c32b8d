// Bindings of low-latency calls on GPUs.
#include "bindings/bindings.h"
#include "runtime/gpu_low_latency.h"

using namespace deepep_moe;

void bind_gpu_low_latency(py::module_& m) {
    using Released = py::call_guard<py::gil_scoped_release>;
    using Communicator = GpuLowLatencyCommunicator;
    py::class_<Communicator, Unlocked<Communicator>>(m, "GpuLowLatencyCommunicator")
        .def(py::init([](int num_ranks, int rank, int device, int num_experts, int num_topk, int hidden, int64_t num_max_tokens,
                         double timeout_s, bool mask_stalled) {
                 const LowLatencyConfig config{num_ranks, num_experts, num_topk, hidden, num_max_tokens};
                 return Unlocked<Communicator>(new Communicator(config, rank, device, timeout_s, mask_stalled));
             }),
             py::kw_only(), py::arg("num_ranks"), py::arg("rank"), py::arg("device"), py::arg("num_experts"), py::arg("num_topk"),
             py::arg("hidden"), py::arg("num_max_tokens"), py::arg("timeout_s"), py::arg("mask_stalled"))
        .def_property_readonly("workspace_bytes", &Communicator::workspace_bytes)
        .def_property_readonly("handle_bytes", &Communicator::handle_bytes)
        .def_property_readonly("failed_mark", &Communicator::failed_mark)
        .def_property_readonly("masks", &Communicator::masks)
        .def_readwrite("num_blocks", &Communicator::num_blocks)
        .def("handle", [](const Communicator& self) { return py::bytes(self.handle()); })
        .def("connect", &Communicator::connect, py::arg("handles"))
        .def("dispatch", &Communicator::dispatch, py::arg("params"), py::arg("sends"), py::arg("receives"), py::arg("stream"), Released())
        .def("combine", &Communicator::combine, py::arg("params"), py::arg("sends"), py::arg("receives"), py::arg("stream"), Released())
        .def("refuse", &Communicator::refuse, py::arg("reason"), py::arg("stream"), Released())
        .def("mask", &Communicator::mask, py::arg("rank"), py::arg("masked"), py::arg("stream"), Released())
        .def("rejoin", &Communicator::rejoin, py::arg("stream"), Released())
        .def("check", &Communicator::check, Released());
}

// Bindings of low-latency calls on GPUs.
#include "bindings/bindings.h"
#include "runtime/nvlink/guarded.h"

using namespace deepep_moe;

void bind_gpu_low_latency(py::module_& m) {
    using Released = py::call_guard<py::gil_scoped_release>;
    bind_calls<GuardedLowLatency>(m, "NvlinkLowLatency")
        .def(py::init([](int num_ranks, int rank, int device, int num_experts, int num_topk, int hidden, int64_t num_max_tokens, int lanes,
                         double timeout_s, bool mask_stalled, int ranks_per_node) {
                 const LowLatencyConfig config{num_ranks, num_experts, num_topk, hidden, num_max_tokens, lanes};
                 return Unlocked<GuardedLowLatency>(new GuardedLowLatency(config, rank, device, timeout_s, mask_stalled, ranks_per_node));
             }),
             py::kw_only(), py::arg("num_ranks"), py::arg("rank"), py::arg("device"), py::arg("num_experts"), py::arg("num_topk"),
             py::arg("hidden"), py::arg("num_max_tokens"), py::arg("lanes"), py::arg("timeout_s"), py::arg("mask_stalled"),
             py::arg("ranks_per_node"))
        .def_property_readonly("handle_bytes", &NvlinkLowLatency::handle_bytes)
        .def_property_readonly("failed_mark", &NvlinkLowLatency::failed_mark)
        .def_property_readonly("masks", &NvlinkLowLatency::masks)
        .def_readwrite("num_blocks", &NvlinkLowLatency::num_blocks)
        .def_property_readonly("rail_bytes", &NvlinkLowLatency::rail_bytes)
        .def("attach_rail",
             [](GuardedLowLatency& self, const py::object& shim, const std::vector<uintptr_t>& addresses, const std::vector<int>& pes) {
                 self.attach_rail(*static_cast<const LowLatencyRailShim*>(PyCapsule_GetPointer(shim.ptr(), kLowLatencyRailShimName)),
                                  addresses, pes);
             })
        .def("mask", &NvlinkLowLatency::mask, Released())
        .def("rejoin", &NvlinkLowLatency::rejoin, Released());
}

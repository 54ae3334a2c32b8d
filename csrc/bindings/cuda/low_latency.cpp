// Bindings of low-latency calls on GPUs.
#include "bindings/tensor.h"
#include "common/low_latency_call.h"
#include "runtime/nvlink/guarded.h"

using namespace deepep_moe;

namespace {

using Released = py::call_guard<py::gil_scoped_release>;

void bind_calls(py::class_<NvlinkLowLatency, Unlocked<NvlinkLowLatency>>& nvlink) {
    nvlink.def(
        "dispatch",
        [](NvlinkLowLatency& self, const TensorArg& x, const TensorArg& topk_idx, const TensorArg& topk_weights, const TensorArg& state,
           const TensorArg& recv_x, const TensorArg& recv_x_scales, const TensorArg& num_recv_tokens_per_expert,
           const TensorArg& statistics, DType dtype, bool is_rounded, bool sends, bool receives, uintptr_t stream) {
            self.dispatch(low_latency_dispatch_of(x, topk_idx, topk_weights, state, recv_x, recv_x_scales, num_recv_tokens_per_expert,
                                                  statistics, dtype, is_rounded),
                          sends, receives, stream);
        },
        py::arg("x"), py::arg("topk_idx"), py::arg("topk_weights"), py::arg("state"), py::arg("recv_x"), py::arg("recv_x_scales"),
        py::arg("num_recv_tokens_per_expert"), py::arg("statistics"), py::arg("dtype"), py::arg("is_rounded"), py::arg("sends"),
        py::arg("receives"), py::arg("stream"), Released());
    nvlink.def(
        "combine",
        [](NvlinkLowLatency& self, const TensorArg& x, const TensorArg& state, const TensorArg& topk_weights, const TensorArg& number,
           const TensorArg& combined_x, const TensorArg& statistics, DType dtype, bool fp8, bool sends, bool receives, uintptr_t stream) {
            self.combine(low_latency_combine_of(x, state, topk_weights, number, combined_x, statistics, dtype, fp8), sends, receives,
                         stream);
        },
        py::arg("x"), py::arg("state"), py::arg("topk_weights"), py::arg("number"), py::arg("combined_x"), py::arg("statistics"),
        py::arg("dtype"), py::arg("fp8"), py::arg("sends"), py::arg("receives"), py::arg("stream"), Released());
}

}  // namespace

void bind_gpu_low_latency(py::module_& m) {
    py::class_<NvlinkLowLatency, Unlocked<NvlinkLowLatency>> nvlink(m, "NvlinkLowLatency");
    bind_calls(nvlink);
    nvlink
        .def(py::init([](int num_ranks, int rank, int device, int num_experts, int num_topk, int hidden, int64_t num_max_tokens,
                         double timeout_s, bool mask_stalled, int ranks_per_node) {
                 const LowLatencyConfig config{num_ranks, num_experts, num_topk, hidden, num_max_tokens};
                 return Unlocked<NvlinkLowLatency>(new NvlinkLowLatency(config, rank, device, timeout_s, mask_stalled, ranks_per_node));
             }),
             py::kw_only(), py::arg("num_ranks"), py::arg("rank"), py::arg("device"), py::arg("num_experts"), py::arg("num_topk"),
             py::arg("hidden"), py::arg("num_max_tokens"), py::arg("timeout_s"), py::arg("mask_stalled"), py::arg("ranks_per_node"))
        .def_property_readonly("workspace_bytes", &NvlinkLowLatency::workspace_bytes)
        .def_property_readonly("handle_bytes", &NvlinkLowLatency::handle_bytes)
        .def_property_readonly("failed_mark", &NvlinkLowLatency::failed_mark)
        .def_property_readonly("masks", &NvlinkLowLatency::masks)
        .def_readwrite("num_blocks", &NvlinkLowLatency::num_blocks)
        .def("handle", [](const NvlinkLowLatency& self) { return py::bytes(self.handle()); })
        .def("connect", &NvlinkLowLatency::connect, py::arg("handles"))
        .def_property_readonly("rail_bytes", &NvlinkLowLatency::rail_bytes)
        .def(
            "attach_rail",
            [](NvlinkLowLatency& self, const py::object& shim, const std::vector<uintptr_t>& addresses, const std::vector<int>& pes) {
                self.attach_rail(*static_cast<const LowLatencyRailShim*>(PyCapsule_GetPointer(shim.ptr(), kLowLatencyRailShimName)),
                                 addresses, pes);
            },
            py::arg("shim"), py::arg("addresses"), py::arg("pes"))
        .def("leak", [](const py::object& self) { self.inc_ref(); })
        .def("disconnect", &NvlinkLowLatency::disconnect)
        .def("refuse", &NvlinkLowLatency::refuse, py::arg("reason"), py::arg("stream"), Released())
        .def("mask", &NvlinkLowLatency::mask, py::arg("rank"), py::arg("masked"), py::arg("stream"), Released())
        .def("rejoin", &NvlinkLowLatency::rejoin, py::arg("stream"), Released())
        .def("check", &NvlinkLowLatency::check, Released())
        .def("shim", [](NvlinkLowLatency& self) { return std::make_unique<GuardedLowLatency>(self); }, py::keep_alive<0, 1>());
    py::class_<GuardedLowLatency>(m, "NvlinkLowLatencyShim")
        .def("capsule", [](GuardedLowLatency& self) { return py::capsule(static_cast<LowLatencyShim*>(&self), kLowLatencyShimName); })
        .def_static("raise_failure", &GuardedLowLatency::raise_failure);
}

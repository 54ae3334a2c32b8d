// Bindings of the GPU library: its communicator and the params of its calls.
#include "bindings/bindings.h"
#include "runtime/gpu_communicator.h"

using namespace deepep_moe;

namespace {

// The routing of a call as Python gives it; scratch is the communicator's.
template <class Params>
void routing_fields(py::class_<Params>& cls) {
    cls.def_property(
        "topk_idx", [](const Params& self) { return reinterpret_cast<uintptr_t>(self.routing.topk_idx); },
        [](Params& self, uintptr_t address) { self.routing.topk_idx = reinterpret_cast<const void*>(address); });
    cls.def_property(
        "topk_idx_is_int64", [](const Params& self) { return self.routing.is_int64; }, [](Params& self, bool value) { self.routing.is_int64 = value; });
    cls.def_property(
        "num_tokens", [](const Params& self) { return self.routing.num_tokens; }, [](Params& self, int64_t value) { self.routing.num_tokens = value; });
}

void bind_plan(py::module_& m) {
    py::class_<GpuPlanParams> plan(m, "GpuPlanParams");
    plan.def(py::init([] { return GpuPlanParams{}; }))
        .def_readwrite("cached", &GpuPlanParams::cached)
        .def_readwrite("is_expert_layout", &GpuPlanParams::is_expert_layout)
        .def_readwrite("expert_alignment", &GpuPlanParams::expert_alignment)
        .def_readwrite("num_recv_rows_bound", &GpuPlanParams::num_recv_rows_bound);
    plan.def_property(
        "narrow_topk_idx", [](const GpuPlanParams& self) { return reinterpret_cast<uintptr_t>(self.routing.narrow_topk_idx); },
        [](GpuPlanParams& self, uintptr_t address) { self.routing.narrow_topk_idx = reinterpret_cast<int32_t*>(address); });
    routing_fields(plan);
    pointer_field(plan, "recv_counts", &GpuPlanParams::recv_counts);
    pointer_field(plan, "num_recv_tokens_per_expert", &GpuPlanParams::num_recv_tokens_per_expert);
    py::class_<GpuCounts>(m, "GpuCounts").def_readonly("num_recv_tokens", &GpuCounts::num_recv_tokens).def_readonly("num_rows", &GpuCounts::num_rows);
}

void bind_moves(py::module_& m) {
    py::class_<GpuDispatchParams> dispatch(m, "GpuDispatchParams");
    dispatch.def(py::init([] { return GpuDispatchParams{}; }))
        .def_readwrite("cached", &GpuDispatchParams::cached)
        .def_readwrite("is_expert_layout", &GpuDispatchParams::is_expert_layout)
        .def_readwrite("recv_topk_idx_is_int64", &GpuDispatchParams::recv_topk_idx_is_int64)
        .def_readwrite("num_send_blocks", &GpuDispatchParams::num_send_blocks)
        .def_readwrite("expert_alignment", &GpuDispatchParams::expert_alignment)
        .def_readwrite("row_bytes", &GpuDispatchParams::row_bytes)
        .def_readwrite("scale_bytes", &GpuDispatchParams::scale_bytes)
        .def_readwrite("num_rows", &GpuDispatchParams::num_rows);
    routing_fields(dispatch);
    pointer_field(dispatch, "x", &GpuDispatchParams::x);
    pointer_field(dispatch, "x_scales", &GpuDispatchParams::x_scales);
    pointer_field(dispatch, "topk_weights", &GpuDispatchParams::topk_weights);
    pointer_field(dispatch, "recv_counts", &GpuDispatchParams::recv_counts);
    pointer_field(dispatch, "num_recv_tokens_per_expert", &GpuDispatchParams::num_recv_tokens_per_expert);
    pointer_field(dispatch, "recv_x", &GpuDispatchParams::recv_x);
    pointer_field(dispatch, "recv_x_scales", &GpuDispatchParams::recv_x_scales);
    pointer_field(dispatch, "recv_topk_idx", &GpuDispatchParams::recv_topk_idx);
    pointer_field(dispatch, "recv_topk_weights", &GpuDispatchParams::recv_topk_weights);
    pointer_field(dispatch, "recv_row_idx", &GpuDispatchParams::recv_row_idx);

    py::class_<GpuCombineParams> combine(m, "GpuCombineParams");
    combine.def(py::init([] { return GpuCombineParams{}; }))
        .def_readwrite("is_expert_layout", &GpuCombineParams::is_expert_layout)
        .def_readwrite("dtype", &GpuCombineParams::dtype)
        .def_readwrite("num_send_blocks", &GpuCombineParams::num_send_blocks);
    routing_fields(combine);
    pointer_field(combine, "recv_counts", &GpuCombineParams::recv_counts);
    pointer_field(combine, "recv_row_idx", &GpuCombineParams::recv_row_idx);
    pointer_field(combine, "x", &GpuCombineParams::x);
    pointer_field(combine, "weights", &GpuCombineParams::weights);
    pointer_field(combine, "lane_values", &GpuCombineParams::lane_values);
    pointer_field(combine, "bias", &GpuCombineParams::bias);
    pointer_field(combine, "combined_x", &GpuCombineParams::combined_x);
    pointer_field(combine, "combined_lane_values", &GpuCombineParams::combined_lane_values);
}

}  // namespace

void bind_gpu(py::module_& m) {
    using Released = py::call_guard<py::gil_scoped_release>;
    m.attr("MAX_GPU_RANKS") = kMaxGpuRanks;
    bind_plan(m);
    bind_moves(m);
    py::class_<GpuCommunicator>(m, "GpuCommunicator")
        .def(py::init([](int num_ranks, int rank, int device, int num_experts, int num_topk, int hidden, int64_t num_max_tokens, double timeout_s) {
                 return std::make_unique<GpuCommunicator>(GpuWorkspaceConfig{num_ranks, num_experts, num_topk, hidden, num_max_tokens}, rank, device,
                                                          timeout_s);
             }),
             py::kw_only(), py::arg("num_ranks"), py::arg("rank"), py::arg("device"), py::arg("num_experts"), py::arg("num_topk"), py::arg("hidden"),
             py::arg("num_max_tokens"), py::arg("timeout_s"))
        .def_property_readonly("workspace_bytes", &GpuCommunicator::workspace_bytes)
        .def("handle", [](const GpuCommunicator& self) { return py::bytes(self.handle()); })
        .def("connect", &GpuCommunicator::connect, py::arg("handles"))
        .def("plan", &GpuCommunicator::plan, py::arg("params"), py::arg("stream"), Released())
        .def("wait_counts", &GpuCommunicator::wait_counts, Released())
        .def("dispatch", &GpuCommunicator::dispatch, py::arg("params"), py::arg("stream"), Released())
        .def("combine", &GpuCommunicator::combine, py::arg("params"), py::arg("stream"), Released())
        .def("refuse", &GpuCommunicator::refuse, py::arg("stream"), Released())
        .def("check", &GpuCommunicator::check, Released());
}

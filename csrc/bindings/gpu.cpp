// Bindings of the GPU library: its communicator and the params of its calls.
#include "bindings/bindings.h"
#include "cuda/launch.h"
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
        "num_tokens", [](const Params& self) { return self.routing.num_tokens; }, [](Params& self, int64_t value) { self.routing.num_tokens = static_cast<int>(value); });
}

void bind_plan(py::module_& m) {
    py::class_<GpuPlanParams> plan(m, "GpuPlanParams");
    plan.def(py::init([] { return GpuPlanParams{}; }))
        .def_readwrite("cached", &GpuPlanParams::cached)
        .def_readwrite("reports_counts", &GpuPlanParams::reports_counts)
        .def_readwrite("is_expert_layout", &GpuPlanParams::is_expert_layout)
        .def_readwrite("expert_alignment", &GpuPlanParams::expert_alignment)
        .def_readwrite("num_recv_rows_bound", &GpuPlanParams::num_recv_rows_bound);
    plan.def_property(
        "narrow_topk_idx", [](const GpuPlanParams& self) { return reinterpret_cast<uintptr_t>(self.routing.narrow_topk_idx); },
        [](GpuPlanParams& self, uintptr_t address) { self.routing.narrow_topk_idx = reinterpret_cast<int32_t*>(address); });
    routing_fields(plan);
    pointer_field(plan, "recv_counts", &GpuPlanParams::recv_counts);
    pointer_field(plan, "num_recv_tokens_per_expert", &GpuPlanParams::num_recv_tokens_per_expert);
    py::class_<GpuCounts>(m, "GpuCounts")
        .def_readonly("num_recv_tokens", &GpuCounts::num_recv_tokens)
        .def_readonly("num_rows", &GpuCounts::num_rows);
}

void bind_moves(py::module_& m) {
    py::class_<GpuDispatchParams> dispatch(m, "GpuDispatchParams");
    dispatch.def(py::init([] { return GpuDispatchParams{}; }))
        .def_readwrite("cached", &GpuDispatchParams::cached)
        .def_readwrite("has_lanes", &GpuDispatchParams::has_lanes)
        .def_readwrite("is_expert_layout", &GpuDispatchParams::is_expert_layout)
        .def_readwrite("is_guess", &GpuDispatchParams::is_guess)
        .def_readwrite("recv_topk_idx_is_int64", &GpuDispatchParams::recv_topk_idx_is_int64)
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
        .def_readwrite("has_lane_values", &GpuCombineParams::has_lane_values)
        .def_readwrite("num_rows", &GpuCombineParams::num_rows)
        .def_readwrite("direct", &GpuCombineParams::direct);
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

void bind_tuning(py::module_& m) {
    py::class_<GpuTuning>(m, "GpuTuning")
        .def_property("ring_warps", [](const GpuTuning& self) { return self.ring.warps; }, [](GpuTuning& self, int value) { self.ring.warps = value; })
        .def_property("ring_stages", [](const GpuTuning& self) { return self.ring.stages; }, [](GpuTuning& self, int value) { self.ring.stages = value; })
        .def_readwrite("uses_bulk_copies", &GpuTuning::uses_bulk_copies)
        .def_readwrite("num_receive_blocks", &GpuTuning::num_receive_blocks)
        .def_readwrite("num_work_blocks", &GpuTuning::num_work_blocks);
}

void bind_weighed_sum(py::module_& m) {
    py::class_<GpuWeighedSumParams> params(m, "GpuWeighedSumParams");
    params.def(py::init([] { return GpuWeighedSumParams{}; }))
        .def_readwrite("num_topk", &GpuWeighedSumParams::num_topk)
        .def_readwrite("num_tokens", &GpuWeighedSumParams::num_tokens)
        .def_readwrite("hidden", &GpuWeighedSumParams::hidden)
        .def_readwrite("lane_stride", &GpuWeighedSumParams::lane_stride)
        .def_readwrite("token_stride", &GpuWeighedSumParams::token_stride)
        .def_readwrite("dtype", &GpuWeighedSumParams::dtype);
    pointer_field(params, "rows", &GpuWeighedSumParams::rows);
    pointer_field(params, "weights", &GpuWeighedSumParams::weights);
    pointer_field(params, "sums", &GpuWeighedSumParams::sums);
    pointer_field(params, "grad", &GpuWeighedSumParams::grad);
    pointer_field(params, "grad_rows", &GpuWeighedSumParams::grad_rows);
    pointer_field(params, "grad_weights", &GpuWeighedSumParams::grad_weights);
    m.def("gpu_weighed_sum", [](const GpuWeighedSumParams& p, uintptr_t stream) { launch_weighed_sum(p, reinterpret_cast<void*>(stream)); },
          py::arg("params"), py::arg("stream"));
    m.def("gpu_weighed_sum_backward",
          [](const GpuWeighedSumParams& p, uintptr_t stream) { launch_weighed_sum_backward(p, reinterpret_cast<void*>(stream)); },
          py::arg("params"), py::arg("stream"));
}

}  // namespace

void bind_gpu(py::module_& m) {
    using Released = py::call_guard<py::gil_scoped_release>;
    m.attr("MAX_GPU_RANKS") = kMaxGpuRanks;
    bind_plan(m);
    bind_moves(m);
    bind_tuning(m);
    bind_weighed_sum(m);
    py::class_<GpuCommunicator>(m, "GpuCommunicator")
        .def(py::init([](int num_ranks, int rank, int device, int num_experts, int num_topk, int hidden, int64_t num_max_tokens, double timeout_s) {
                 const GpuWorkspaceConfig config{num_ranks, num_experts, num_topk, hidden, num_max_tokens};
                 auto made = std::make_unique<GpuCommunicator>(config, rank, device, timeout_s);
                 made->set_poll(poll_signals);
                 return made;
             }),
             py::kw_only(), py::arg("num_ranks"), py::arg("rank"), py::arg("device"), py::arg("num_experts"), py::arg("num_topk"), py::arg("hidden"),
             py::arg("num_max_tokens"), py::arg("timeout_s"))
        .def_property_readonly("workspace_bytes", &GpuCommunicator::workspace_bytes)
        .def_property_readonly("num_multiprocessors", &GpuCommunicator::num_multiprocessors)
        .def_readwrite("tuning", &GpuCommunicator::tuning)
        .def("handle", [](const GpuCommunicator& self) { return py::bytes(self.handle()); })
        .def("connect", &GpuCommunicator::connect, py::arg("handles"))
        .def("plan", &GpuCommunicator::plan, py::arg("params"), py::arg("signature"), py::arg("stream"), Released())
        .def("wait_counts", [](GpuCommunicator& self, int64_t call, uintptr_t numbers) { return self.wait_counts(call, reinterpret_cast<int64_t*>(numbers)); },
             py::arg("call"), py::arg("numbers"), Released())
        .def("dispatch", py::overload_cast<GpuDispatchParams, int, uintptr_t>(&GpuCommunicator::dispatch), py::arg("params"), py::arg("num_sms"), py::arg("stream"), Released())
        .def("combine", &GpuCommunicator::combine, py::arg("params"), py::arg("num_sms"), py::arg("finishes"), py::arg("stream"), Released())
        .def("start_dispatch", &GpuCommunicator::start_dispatch, py::arg("params"), py::arg("num_sms"), py::arg("stream"), Released())
        .def("start_combine", &GpuCommunicator::start_combine, py::arg("params"), py::arg("num_sms"), py::arg("stream"), Released())
        .def("copy", &GpuCommunicator::copy, py::arg("counts"), py::arg("slot_bytes"), py::arg("stream"), Released())
        .def("copy_block", &GpuCommunicator::copy_block, py::arg("peer"), py::arg("bytes"), py::arg("stream"), Released())
        .def("end_dispatch", &GpuCommunicator::end_dispatch, py::arg("params"), py::arg("stream"), Released())
        .def("end_combine", &GpuCommunicator::end_combine, py::arg("params"), py::arg("stream"), Released())
        .def("refuse", &GpuCommunicator::refuse, py::arg("reason"), py::arg("stream"), Released())
        .def("check", &GpuCommunicator::check, Released());
    m.def(
        "gpu_quantize",
        [](uintptr_t x, uintptr_t y, uintptr_t scales, int64_t num_rows, int64_t hidden, DType dtype, uintptr_t stream) {
            launch_quantize({num_rows, hidden, dtype, reinterpret_cast<const std::byte*>(x), reinterpret_cast<std::byte*>(y),
                             reinterpret_cast<float*>(scales)},
                            reinterpret_cast<void*>(stream));
        },
        py::kw_only(), py::arg("x"), py::arg("y"), py::arg("scales"), py::arg("num_rows"), py::arg("hidden"), py::arg("dtype"), py::arg("stream"));
    m.def(
        "gpu_weigh_backward",
        [](uintptr_t grad, uintptr_t x, uintptr_t weights, uintptr_t grad_x, uintptr_t grad_weights, int64_t num_rows, int64_t hidden, DType dtype,
           uintptr_t stream) {
            launch_weigh_backward({num_rows, hidden, dtype, reinterpret_cast<const std::byte*>(grad), reinterpret_cast<const std::byte*>(x),
                                   reinterpret_cast<const float*>(weights), reinterpret_cast<std::byte*>(grad_x),
                                   reinterpret_cast<float*>(grad_weights)},
                                  reinterpret_cast<void*>(stream));
        },
        py::kw_only(), py::arg("grad"), py::arg("x"), py::arg("weights"), py::arg("grad_x"), py::arg("grad_weights"), py::arg("num_rows"),
        py::arg("hidden"), py::arg("dtype"), py::arg("stream"));
    m.def(
        "gpu_workspace_bytes",
        [](int num_ranks, int num_experts, int num_topk, int hidden, int64_t num_max_tokens) {
            return GpuWorkspaceLayout({num_ranks, num_experts, num_topk, hidden, num_max_tokens}).total_bytes;
        },
        py::kw_only(), py::arg("num_ranks"), py::arg("num_experts"), py::arg("num_topk"), py::arg("hidden"), py::arg("num_max_tokens"));
    m.def("gpu_slot_bytes", [](int64_t row_bytes, int64_t tail_bytes) { return GpuSlotLayout(row_bytes, tail_bytes).bytes; }, py::arg("row_bytes"),
          py::arg("tail_bytes"));
}

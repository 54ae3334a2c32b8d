// Bindings of the GPU library: its exchange, and kernels of one GPU.
#include "bindings/bindings.h"
#include "cuda/launch.h"
#include "runtime/nvlink/exchange.h"

using namespace deepep_moe;

void bind_nvlink_calls(py::module_& m, py::class_<NvlinkExchange, Unlocked<NvlinkExchange>>& exchange);

namespace {

void bind_tuning(py::module_& m) {
    py::class_<GpuTuning>(m, "GpuTuning")
        .def_property(
            "ring_warps", [](const GpuTuning& self) { return self.ring.warps; },
            [](GpuTuning& self, int value) { self.ring.warps = value; })
        .def_property(
            "ring_stages", [](const GpuTuning& self) { return self.ring.stages; },
            [](GpuTuning& self, int value) { self.ring.stages = value; })
        .def_readwrite("uses_bulk_copies", &GpuTuning::uses_bulk_copies)
        .def_readwrite("num_receive_blocks", &GpuTuning::num_receive_blocks)
        .def_readwrite("num_work_blocks", &GpuTuning::num_work_blocks)
        .def_readwrite("num_sms", &GpuTuning::num_sms)
        .def_readwrite("num_sms_of_sums", &GpuTuning::num_sms_of_sums);
}

void bind_weighted_sum(py::module_& m) {
    py::class_<GpuWeightedSumParams> params(m, "GpuWeightedSumParams");
    params.def(py::init([] { return GpuWeightedSumParams{}; }))
        .def_readwrite("num_topk", &GpuWeightedSumParams::num_topk)
        .def_readwrite("num_tokens", &GpuWeightedSumParams::num_tokens)
        .def_readwrite("hidden", &GpuWeightedSumParams::hidden)
        .def_readwrite("lane_stride", &GpuWeightedSumParams::lane_stride)
        .def_readwrite("token_stride", &GpuWeightedSumParams::token_stride)
        .def_readwrite("dtype", &GpuWeightedSumParams::dtype);
    pointer_field(params, "rows", &GpuWeightedSumParams::rows);
    pointer_field(params, "weights", &GpuWeightedSumParams::weights);
    pointer_field(params, "sums", &GpuWeightedSumParams::sums);
    pointer_field(params, "grad", &GpuWeightedSumParams::grad);
    pointer_field(params, "grad_rows", &GpuWeightedSumParams::grad_rows);
    pointer_field(params, "grad_weights", &GpuWeightedSumParams::grad_weights);
    m.def(
        "gpu_weighted_sum",
        [](const GpuWeightedSumParams& p, uintptr_t stream) { launch_weighted_sum(p, reinterpret_cast<void*>(stream)); }, py::arg("params"),
        py::arg("stream"));
    m.def(
        "gpu_weighted_sum_backward",
        [](const GpuWeightedSumParams& p, uintptr_t stream) { launch_weighted_sum_backward(p, reinterpret_cast<void*>(stream)); },
        py::arg("params"), py::arg("stream"));
}

}  // namespace

void bind_gpu(py::module_& m) {
    using Released = py::call_guard<py::gil_scoped_release>;
    m.attr("MAX_GPU_RANKS") = kMaxGpuRanks;
    bind_tuning(m);
    bind_weighted_sum(m);
    py::class_<NvlinkExchange, Unlocked<NvlinkExchange>> exchange(m, "NvlinkExchange");
    bind_nvlink_calls(m, exchange);
    exchange
        .def(py::init([](int num_ranks, int rank, int device, int num_experts, int num_topk, int hidden, int64_t num_max_tokens,
                         double timeout_s) {
                 const GpuWorkspaceConfig config{num_ranks, num_experts, num_topk, hidden, num_max_tokens};
                 Unlocked<NvlinkExchange> made(new NvlinkExchange(config, rank, device, timeout_s));
                 made->set_poll(poll_signals);
                 return made;
             }),
             py::kw_only(), py::arg("num_ranks"), py::arg("rank"), py::arg("device"), py::arg("num_experts"), py::arg("num_topk"),
             py::arg("hidden"), py::arg("num_max_tokens"), py::arg("timeout_s"))
        .def_property_readonly("workspace_bytes", &NvlinkExchange::workspace_bytes)
        .def_property_readonly("num_calls", &NvlinkExchange::num_calls)
        .def_property_readonly("num_handle_numbers", &NvlinkExchange::num_handle_numbers)
        .def_property_readonly("num_multiprocessors", &NvlinkExchange::num_multiprocessors)
        .def_readwrite("tuning", &NvlinkExchange::tuning)
        .def("handle", [](const NvlinkExchange& self) { return py::bytes(self.handle()); })
        .def("connect", &NvlinkExchange::connect, py::arg("handles"))
        .def("copy_block", &NvlinkExchange::copy_block, py::arg("peer"), py::arg("bytes"), py::arg("stream"), Released())
        .def("refuse", &NvlinkExchange::refuse, py::arg("reason"), py::arg("stream"), Released())
        .def("check", &NvlinkExchange::check, Released());
    m.def(
        "gpu_quantize",
        [](uintptr_t x, uintptr_t y, uintptr_t scales, int64_t num_rows, int64_t hidden, DType dtype, uintptr_t stream) {
            launch_quantize({num_rows, hidden, dtype, reinterpret_cast<const std::byte*>(x), reinterpret_cast<std::byte*>(y),
                             reinterpret_cast<float*>(scales)},
                            reinterpret_cast<void*>(stream));
        },
        py::kw_only(), py::arg("x"), py::arg("y"), py::arg("scales"), py::arg("num_rows"), py::arg("hidden"), py::arg("dtype"),
        py::arg("stream"));
    m.def(
        "gpu_workspace_bytes",
        [](int num_ranks, int num_experts, int num_topk, int hidden, int64_t num_max_tokens) {
            return GpuWorkspaceLayout({num_ranks, num_experts, num_topk, hidden, num_max_tokens}).total_bytes;
        },
        py::kw_only(), py::arg("num_ranks"), py::arg("num_experts"), py::arg("num_topk"), py::arg("hidden"), py::arg("num_max_tokens"));
}

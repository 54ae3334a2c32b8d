// Bindings of low-latency calls: the communicator of processes.
#include "bindings/low_latency.h"

#include <limits>

#include "cuda/low_latency.h"
#include "runtime/shm/low_latency.h"

using namespace deepep_moe;

namespace {

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
    m.attr("LOW_LATENCY_MAX_HOST_RANKS") = kLowLatencyMaxHostRanks;
    m.attr("LOW_LATENCY_MAX_RANKS") = kLowLatencyMaxRanks;
    m.def(
        "low_latency_handle_offsets",
        [](int num_ranks, int num_experts, int num_topk, int hidden, int64_t num_max_tokens) {
            const LowLatencyHandleLayout layout({num_ranks, num_experts, num_topk, hidden, num_max_tokens});
            return py::make_tuple(layout.num_tokens, layout.rows);
        },
        py::kw_only(), py::arg("num_ranks"), py::arg("num_experts"), py::arg("num_topk"), py::arg("hidden"), py::arg("num_max_tokens"));
    m.def(
        "low_latency_gpu_workspace_bytes",
        [](int num_ranks, int num_experts, int num_topk, int hidden, int64_t num_max_tokens) {
            return GpuLowLatencyLayout({num_ranks, num_experts, num_topk, hidden, num_max_tokens}, 1).total_bytes;
        },
        py::kw_only(), py::arg("num_ranks"), py::arg("num_experts"), py::arg("num_topk"), py::arg("hidden"), py::arg("num_max_tokens"));
    py::class_<ShmLowLatency> shm(m, "ShmLowLatency");
    bind_low_latency_calls<ShmLowLatency>(shm);
    shm.def(py::init(&make), py::kw_only(), py::arg("num_ranks"), py::arg("rank"), py::arg("num_experts"), py::arg("num_topk"),
            py::arg("hidden"), py::arg("num_max_tokens"), py::arg("timeout_s"), py::arg("mask_stalled"))
        .def_property_readonly("workspace_bytes", &ShmLowLatency::workspace_bytes)
        .def_property_readonly("handle_bytes", &ShmLowLatency::handle_bytes)
        .def_property_readonly("num_calls", &ShmLowLatency::num_calls)
        .def_property_readonly("is_broken_off", &ShmLowLatency::is_broken_off)
        .def_property_readonly("path", &ShmLowLatency::path)
        .def_property_readonly("masks", &ShmLowLatency::masks)
        .def("connect", &ShmLowLatency::connect, py::arg("paths"), py::arg("pids"))
        .def("seal", &ShmLowLatency::seal)
        .def("mask", &ShmLowLatency::mask, py::arg("rank"), py::arg("masked"), Released())
        .def("rejoin", &ShmLowLatency::rejoin, Released())
        .def("refuse", &ShmLowLatency::refuse, py::arg("reason"), Released())
        .def("check", [](const ShmLowLatency&) {});  // of a GPU's: what it has reported
}

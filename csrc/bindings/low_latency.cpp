// Binds what low-latency calls need: sizes, the words of calls, and the memory of ranks on one host, whose calls Python makes.
#include <atomic>
#include <limits>

#include "bindings/bindings.h"
#include "common/low_latency.h"
#include "common/signature.h"
#include "cpu/wait.h"
#include "cuda/low_latency.h"
#include "runtime/shm/peers.h"

using namespace deepep_moe;

namespace {

std::atomic_ref<uint64_t> word(const HostPeers& self, int rank, int64_t offset) {
    return std::atomic_ref(*reinterpret_cast<uint64_t*>(self.memory(rank) + offset));
}

void bind_peers(py::module_& m) {
    py::class_<HostPeers>(m, "HostPeers")
        .def(py::init<int, int, size_t>())
        .def_property_readonly("path", &HostPeers::path)
        .def_property_readonly("is_owner", &HostPeers::is_owner)
        .def("check_owner", &HostPeers::check_owner)
        .def("connect", &HostPeers::connect)
        .def("seal", &HostPeers::seal)
        .def("give_back", &HostPeers::give_back)
        .def("is_mapped", [](const HostPeers& self, int rank) { return self.memory(rank) != nullptr; })
        .def("memory", [](const HostPeers& self, int rank) { return py::memoryview::from_memory(self.memory(rank), self.segment_bytes()); })
        .def("load",
             [](const HostPeers& self, int rank, int64_t offset) { return word(self, rank, offset).load(std::memory_order_acquire); })
        .def("store", [](const HostPeers& self, int rank, int64_t offset,
                         uint64_t value) { word(self, rank, offset).store(value, std::memory_order_release); })
        .def("is_gone", &HostPeers::is_gone)
        .def("why_silent", [](const HostPeers& self, int rank, double timeout_s) {
            return py::make_tuple(self.why_silent(rank, timeout_s), self.advice(rank));
        });
}

}  // namespace

void bind_low_latency(py::module_& m) {
    m.attr("LOW_LATENCY_MAX_TOKENS") = std::numeric_limits<uint16_t>::max();
    m.attr("LOW_LATENCY_MAX_LOCAL_EXPERTS") = std::numeric_limits<int16_t>::max();
    m.attr("LOW_LATENCY_MAX_HOST_RANKS") = kLowLatencyMaxHostRanks;
    m.attr("LOW_LATENCY_MAX_RANKS") = kLowLatencyMaxRanks;
    LowLatencyWhat refused{};
    refused.is_refused = true;
    m.attr("LOW_LATENCY_REFUSED") = refused.packed();
    m.attr("HAS_LEFT") = kHasLeft;
    const py::arg num_ranks("num_ranks"), num_experts("num_experts"), num_topk("num_topk"), hidden("hidden"),
        num_max_tokens("num_max_tokens");
    m.def(
        "low_latency_handle_offsets",
        [](int num_ranks, int num_experts, int num_topk, int hidden, int64_t num_max_tokens) {
            const LowLatencyHandleLayout layout({num_ranks, num_experts, num_topk, hidden, num_max_tokens});
            return py::make_tuple(layout.num_tokens, layout.rank_masks, layout.rows, layout.total_bytes);
        },
        py::kw_only(), num_ranks, num_experts, num_topk, hidden, num_max_tokens);
    m.def(
        "low_latency_gpu_workspace_bytes",
        [](int num_ranks, int num_experts, int num_topk, int hidden, int64_t num_max_tokens) {
            return GpuLowLatencyLayout({num_ranks, num_experts, num_topk, hidden, num_max_tokens}, 1).total_bytes;
        },
        py::kw_only(), num_ranks, num_experts, num_topk, hidden, num_max_tokens);
    m.def("low_latency_what", [](bool is_combine, DType dtype, bool fp8, bool is_rounded, bool has_weights) {
        const auto operation = is_combine ? LowLatencyOperation::kCombine : LowLatencyOperation::kDispatch;
        return LowLatencyWhat{operation, dtype, fp8, is_rounded, has_weights, false}.packed();
    });
    m.def("describe_low_latency", [](unsigned what) { return describe(LowLatencyWhat::unpacked(what)); });
    m.def("are_waits_hurried", [] { return waits_hurry.load(); });
    bind_peers(m);
}

// Bindings of low-latency calls between processes. Python moves the rows.
#include <limits>
#include <stdexcept>

#include "bindings/tensor.h"

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

// Rows that a Python object moves. Its `argument_error` is reported to the peers here. Other errors, of any class, the caller must report.
class PythonRows final : public LowLatencyRows {
public:
    explicit PythonRows(py::handle rows) : rows_(rows) {}

    void write(uint64_t number, RankSet ranks) override { call("write", number, ranks); }
    void write_weighted(uint64_t number, RankSet ranks) override { call("write_weighted", number, ranks); }
    void read(uint64_t number, RankSet entered, RankSet arrived, const std::vector<int>& values) override {
        call("read", number, entered, arrived, values);
    }
    bool is_interrupted() const override { return is_interrupted_; }

private:
    template <class... Args>
    void call(const char* method, const Args&... args) {
        const py::gil_scoped_acquire gil;
        try {
            rows_.attr(method)(args...);
        } catch (py::error_already_set& error) {
            is_interrupted_ = !error.matches(rows_.attr("argument_error"));
            if (is_interrupted_) throw;
            throw std::invalid_argument(py::str(error.value()));
        }
    }

    const py::handle rows_;
    bool is_interrupted_ = false;
};

template <LowLatencyOperation operation>
void run(ShmLowLatency& self, py::handle rows, DType dtype, bool fp8, bool is_rounded, bool has_weights, int value,
         const TensorArg& wait_ns, bool sends, bool receives) {
    PythonRows moved(rows);
    const uint64_t number = sends ? 0 : py::cast<uint64_t>(rows.attr("number"));
    const LowLatencyWhat what{operation, dtype, fp8, is_rounded, has_weights, false};
    const py::gil_scoped_release released;
    self.run({what, value, number, wait_ns.as<int64_t*>(), moved}, sends, receives);
}

template <LowLatencyOperation operation, class Class>
void bind_call(Class& shm, const char* name) {
    shm.def(name, &run<operation>, py::arg("rows"), py::arg("dtype"), py::arg("fp8"), py::arg("is_rounded"), py::arg("has_weights"),
            py::arg("value"), py::arg("wait_ns"), py::arg("sends"), py::arg("receives"));
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
            return py::make_tuple(layout.num_tokens, layout.rank_masks, layout.rows);
        },
        py::kw_only(), py::arg("num_ranks"), py::arg("num_experts"), py::arg("num_topk"), py::arg("hidden"), py::arg("num_max_tokens"));
    m.def(
        "low_latency_gpu_workspace_bytes",
        [](int num_ranks, int num_experts, int num_topk, int hidden, int64_t num_max_tokens) {
            return GpuLowLatencyLayout({num_ranks, num_experts, num_topk, hidden, num_max_tokens}, 1).total_bytes;
        },
        py::kw_only(), py::arg("num_ranks"), py::arg("num_experts"), py::arg("num_topk"), py::arg("hidden"), py::arg("num_max_tokens"));
    py::class_<ShmLowLatency> shm(m, "ShmLowLatency");
    bind_call<LowLatencyOperation::kDispatch>(shm, "dispatch");
    bind_call<LowLatencyOperation::kCombine>(shm, "combine");
    shm.def(py::init(&make), py::kw_only(), py::arg("num_ranks"), py::arg("rank"), py::arg("num_experts"), py::arg("num_topk"),
            py::arg("hidden"), py::arg("num_max_tokens"), py::arg("timeout_s"), py::arg("mask_stalled"))
        .def_property_readonly("workspace_bytes", &ShmLowLatency::workspace_bytes)
        .def_property_readonly("handle_bytes", &ShmLowLatency::handle_bytes)
        .def_property_readonly("slot_bytes", [](const ShmLowLatency& self) { return self.layout().slot_bytes; })
        .def_property_readonly("slots", [](const ShmLowLatency& self) { return self.layout().slots; })
        .def(
            "area",
            [](const ShmLowLatency& self, int owner, int source, uint64_t number) {
                return py::memoryview::from_memory(self.area(owner, source, number), self.layout().area_bytes);
            },
            py::arg("owner"), py::arg("source"), py::arg("number"))
        .def_property_readonly("num_calls", &ShmLowLatency::num_calls)
        .def("is_interrupted", &ShmLowLatency::is_interrupted, py::arg("number"))
        .def_property_readonly("path", &ShmLowLatency::path)
        .def_property_readonly("masks", &ShmLowLatency::masks)
        .def("connect", &ShmLowLatency::connect, py::arg("paths"), py::arg("pids"))
        .def("seal", &ShmLowLatency::seal)
        .def("free", &ShmLowLatency::free)
        .def("mask", &ShmLowLatency::mask, py::arg("rank"), py::arg("masked"), Released())
        .def("rejoin", &ShmLowLatency::rejoin, Released())
        .def("refuse", &ShmLowLatency::refuse, py::arg("reason"), Released())
        .def("check", [](const ShmLowLatency&) {});  // does nothing here; on GPUs it raises reported failures
}

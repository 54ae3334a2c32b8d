// Bindings of the CPU library: the communicator, the params of its calls, the memory pool.
#include <system_error>

#include "bindings/bindings.h"
#include "runtime/shm/exchange.h"
#include "runtime/shm/pool.h"
#include "runtime/process.h"

using namespace deepep_moe;

namespace {

void raise_with(const char* type, const char* message, const py::dict& attributes) {
    const py::object error = py::module_::import("deepep_moe.errors").attr(type)(message, **attributes);
    PyErr_SetObject(py::type::handle_of(error).ptr(), error.ptr());
}

void translate(std::exception_ptr pointer) {
    using namespace py::literals;
    try {
        if (pointer) std::rethrow_exception(pointer);
    } catch (const TimeoutError& e) {
        raise_with("EPTimeoutError", e.what(),
                   py::dict("rank"_a = e.rank, "phase"_a = e.phase, "expected"_a = e.expected, "seen"_a = e.seen));
    } catch (const PeerError& e) {
        raise_with("EPPeerError", e.what(), py::dict("rank"_a = e.rank));
    } catch (const CapacityError& e) {
        raise_with("EPCapacityError", e.what(), py::dict("rank"_a = e.rank));
    } catch (const MismatchError& e) {
        raise_with("EPMismatchError", e.what(), py::dict());
    } catch (const DestroyedError& e) {
        raise_with("BufferDestroyedError", e.what(), py::dict());
    } catch (const std::system_error& e) {
        PyErr_SetObject(PyExc_OSError, py::make_tuple(e.code().value(), e.what()).ptr());
    }
}

void bind_types(py::module_& m) {
    py::enum_<DType>(m, "DType")
        .value("float32", DType::kFloat32)
        .value("bfloat16", DType::kBFloat16)
        .value("float16", DType::kFloat16)
        .value("float8", DType::kFloat8);
    py::enum_<Layout>(m, "Layout").value("rank", Layout::kRank).value("expert", Layout::kExpert);
    py::enum_<Operation>(m, "Operation")
        .value("dispatch", Operation::kDispatch)
        .value("cached_dispatch", Operation::kCachedDispatch)
        .value("combine", Operation::kCombine);
    py::class_<Signature>(m, "Signature")
        .def(py::init([](Operation operation, DType dtype, Layout layout, int expert_alignment, int64_t handle_call, bool weights,
                         bool scales, bool topk_weight_grads) {
                 return Signature{operation, dtype, layout, expert_alignment, handle_call, weights, scales, topk_weight_grads};
             }),
             py::arg("operation"), py::arg("dtype"), py::arg("layout"), py::kw_only(), py::arg("expert_alignment") = 1,
             py::arg("handle_call") = 0, py::arg("has_weights") = false, py::arg("has_scales") = false,
             py::arg("has_topk_weight_grads") = false);
}

void bind_plan(py::module_& m) {
    py::class_<LayoutParams> layout(m, "LayoutParams");
    layout.def(py::init([] { return LayoutParams{}; }))
        .def_readwrite("is_int64", &LayoutParams::is_int64)
        .def_readwrite("num_tokens", &LayoutParams::num_tokens)
        .def_readwrite("num_topk", &LayoutParams::num_topk)
        .def_readwrite("num_ranks", &LayoutParams::num_ranks)
        .def_readwrite("num_experts", &LayoutParams::num_experts);
    pointer_field(layout, "topk_idx", &LayoutParams::topk_idx);
    pointer_field(layout, "narrow_topk_idx", &LayoutParams::narrow_topk_idx);

    py::class_<PlanParams> plan(m, "PlanParams");
    plan.def(py::init([](const Signature& signature, const LayoutParams& layout) {
            return PlanParams{signature, layout, -1, nullptr, nullptr};
        }))
        .def_readwrite("num_recv_rows_bound", &PlanParams::num_recv_rows_bound);
    pointer_field(plan, "recv_counts", &PlanParams::recv_counts);
    pointer_field(plan, "num_recv_tokens_per_expert", &PlanParams::num_recv_tokens_per_expert);
    py::class_<PlanResult>(m, "PlanResult")
        .def_readonly("num_recv_tokens", &PlanResult::num_recv_tokens)
        .def_readonly("num_rows", &PlanResult::num_rows);
}

void bind_params(py::module_& m) {
    py::class_<DispatchParams> dispatch(m, "DispatchParams");
    dispatch.def(py::init([] { return DispatchParams{}; }))
        .def_readwrite("layout", &DispatchParams::layout)
        .def_readwrite("cached", &DispatchParams::cached)
        .def_readwrite("streaming", &DispatchParams::streaming)
        .def_readwrite("num_topk", &DispatchParams::num_topk)
        .def_readwrite("num_experts", &DispatchParams::num_experts)
        .def_readwrite("row_bytes", &DispatchParams::row_bytes)
        .def_readwrite("scale_bytes", &DispatchParams::scale_bytes)
        .def_readwrite("num_tokens", &DispatchParams::num_tokens)
        .def_readwrite("recv_topk_idx_is_int64", &DispatchParams::recv_topk_idx_is_int64);
    pointer_field(dispatch, "x", &DispatchParams::x);
    pointer_field(dispatch, "x_scales", &DispatchParams::x_scales);
    pointer_field(dispatch, "topk_idx", &DispatchParams::topk_idx);
    pointer_field(dispatch, "topk_weights", &DispatchParams::topk_weights);
    pointer_field(dispatch, "recv_counts", &DispatchParams::recv_counts);
    pointer_field(dispatch, "recv_x", &DispatchParams::recv_x);
    pointer_field(dispatch, "recv_x_scales", &DispatchParams::recv_x_scales);
    pointer_field(dispatch, "recv_topk_idx", &DispatchParams::recv_topk_idx);
    pointer_field(dispatch, "recv_topk_weights", &DispatchParams::recv_topk_weights);
    pointer_field(dispatch, "recv_row_idx", &DispatchParams::recv_row_idx);

    py::class_<CombineParams> combine(m, "CombineParams");
    combine.def(py::init([] { return CombineParams{}; }))
        .def_readwrite("dtype", &CombineParams::dtype)
        .def_readwrite("layout", &CombineParams::layout)
        .def_readwrite("num_topk", &CombineParams::num_topk)
        .def_readwrite("num_experts", &CombineParams::num_experts)
        .def_readwrite("hidden", &CombineParams::hidden)
        .def_readwrite("num_tokens", &CombineParams::num_tokens);
    pointer_field(combine, "recv_counts", &CombineParams::recv_counts);
    pointer_field(combine, "recv_row_idx", &CombineParams::recv_row_idx);
    pointer_field(combine, "x", &CombineParams::x);
    pointer_field(combine, "weights", &CombineParams::weights);
    pointer_field(combine, "topk_weight_grads", &CombineParams::topk_weight_grads);
    pointer_field(combine, "topk_idx", &CombineParams::topk_idx);
    pointer_field(combine, "bias", &CombineParams::bias);
    pointer_field(combine, "combined_x", &CombineParams::combined_x);
    pointer_field(combine, "combined_topk_weight_grads", &CombineParams::combined_topk_weight_grads);
}

void bind_communicator(py::module_& m) {
    using Released = py::call_guard<py::gil_scoped_release>;
    py::class_<ShmExchange>(m, "ShmExchange")
        .def(py::init([](int num_ranks, int rank, int num_channels, int num_experts, int num_topk, int hidden, double timeout_s) {
                 auto made = std::make_unique<ShmExchange>(WorkspaceConfig{num_ranks, num_channels, num_experts, num_topk, hidden}, rank,
                                                           timeout_s);
                 made->set_poll(poll_signals);
                 return made;
             }),
             py::kw_only(), py::arg("num_ranks"), py::arg("rank"), py::arg("num_channels"), py::arg("num_experts"), py::arg("num_topk"),
             py::arg("hidden"), py::arg("timeout_s"))
        .def_property_readonly("path", &ShmExchange::path)
        .def_property_readonly("workspace_bytes", &ShmExchange::workspace_bytes)
        .def_property_readonly("num_calls", &ShmExchange::num_calls)
        .def("connect", &ShmExchange::connect, py::arg("paths"), py::arg("pids"))
        .def("seal", &ShmExchange::seal)
        .def("plan", &ShmExchange::plan, py::arg("params"), Released())
        .def("dispatch", &ShmExchange::dispatch, py::arg("params"), Released())
        .def("dispatch_cached", &ShmExchange::dispatch_cached, py::arg("signature"), py::arg("params"), Released())
        .def("combine", &ShmExchange::combine, py::arg("signature"), py::arg("params"), Released())
        .def("refuse", &ShmExchange::refuse, py::arg("message"), Released());
}

void bind_pool(py::module_& m) {
    py::class_<HostPool::Block>(m, "HostBlock", py::buffer_protocol()).def_buffer([](HostPool::Block& self) {
        return py::buffer_info(self.data(), 1, py::format_descriptor<uint8_t>::format(), static_cast<py::ssize_t>(self.bytes()));
    });
    py::class_<HostPool, std::shared_ptr<HostPool>>(m, "HostPool")
        .def(py::init<>())
        .def("allocate", &HostPool::allocate, py::arg("num_bytes"))
        .def("trim", &HostPool::trim, py::arg("keep_bytes") = 0)
        .def_property_readonly("bytes_in_use", &HostPool::bytes_in_use)
        .def_property_readonly("bytes_cached", &HostPool::bytes_cached);
}

}  // namespace

void bind_exchange(py::module_& m) {
    py::register_local_exception_translator(translate);
    m.attr("MAX_RANKS") = kMaxRanks;
    m.attr("MAX_TOPK") = kMaxTopk;
    m.attr("SCALE_BLOCK") = kScaleBlock;
    m.attr("ROW_ALIGNMENT") = kRowAlignment;
    bind_types(m);
    bind_plan(m);
    bind_params(m);
    bind_communicator(m);
    bind_pool(m);
    py::class_<Process>(m, "Process").def("is_gone", &Process::is_gone);
    m.def("running", &running, py::arg("pid"));
    m.def(
        "workspace_bytes",
        [](int num_ranks, int num_channels, int num_experts, int num_topk, int hidden) {
            return WorkspaceLayout({num_ranks, num_channels, num_experts, num_topk, hidden}).total_bytes();
        },
        py::kw_only(), py::arg("num_ranks"), py::arg("num_channels"), py::arg("num_experts"), py::arg("num_topk"), py::arg("hidden"));
}

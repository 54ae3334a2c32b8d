// Binds the CPU library: the exchange between processes and its calls.
#include <system_error>

#include "bindings/handle.h"
#include "runtime/shm/call.h"
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
        raise_with("EPPeerError", e.what(), py::dict("rank"_a = e.rank, "code"_a = e.cause));
    } catch (const NoExpertError& e) {
        raise_with("no_expert", e.what(), py::dict());
    } catch (const CapacityError& e) {
        raise_with("EPCapacityError", e.what(), py::dict("rank"_a = e.rank));
    } catch (const MismatchError& e) {
        raise_with("EPMismatchError", e.what(), py::dict());
    } catch (const ThreadsError& e) {
        raise_with("EPError", e.what(), py::dict());
    } catch (const HurriedError& e) {
        raise_with("EPError", e.what(), py::dict());
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
        .value("float8_e4m3fn", DType::kFloat8)
        .value("float8_e5m2", DType::kFloat8E5M2);
}

// ---- calls: arguments, tensors and a handle are converted to params in one step ----

TensorArg tensor_of(py::handle owner, const char* name) { return tensor_arg(owner.attr(name)); }

std::pair<int64_t, int64_t> plan(ShmExchange& self, DType dtype, py::handle args, const TensorArg& narrow_topk_idx,
                                 const TensorArg& recv_counts, const TensorArg& num_recv_tokens_per_expert) {
    const Layout layout = args.attr("layout").cast<std::string>() == "expert" ? Layout::kExpert : Layout::kRank;
    Signature signature{Operation::kDispatch, dtype, layout, args.attr("expert_alignment").cast<int>(), 0, false, false, false};
    signature.has_weights = !args.attr("topk_weights").is_none(), signature.has_scales = !args.attr("x_scales").is_none();
    PlanParams params = plan_of(self.config(), signature, tensor_of(args, "topk_idx"), args.attr("num_recv_rows").cast<int64_t>());
    params.layout.narrow_topk_idx = narrow_topk_idx.as<int32_t*>();
    params.recv_counts = recv_counts.as<int32_t*>();
    params.num_recv_tokens_per_expert = num_recv_tokens_per_expert.as<int32_t*>();
    const py::gil_scoped_release released;
    const PlanResult result = self.plan(params);
    return {result.num_recv_tokens, result.num_rows};
}

DispatchArg dispatch_arg(py::handle args, py::handle rows) {
    DispatchArg arg;
    arg.x = tensor_of(args, "x"), arg.x_scales = tensor_of(args, "x_scales"), arg.topk_weights = tensor_of(args, "topk_weights");
    arg.recv_x = tensor_of(rows, "recv_x"), arg.recv_x_scales = tensor_of(rows, "recv_x_scales");
    arg.recv_topk_weights = tensor_of(rows, "recv_topk_weights");
    return arg;
}

void dispatch(ShmExchange& self, const HandleArg& handle, py::handle args, py::handle rows, const TensorArg& recv_topk_idx) {
    DispatchArg arg = dispatch_arg(args, rows);
    arg.recv_topk_idx = recv_topk_idx;
    const py::gil_scoped_release released;
    self.dispatch(dispatch_of(self.config(), handle, arg, false));
}

void dispatch_cached(ShmExchange& self, DType dtype, py::handle args, py::handle rows) {
    const HandleArg handle = handle_arg(args.attr("handle"));
    const DispatchArg arg = dispatch_arg(args, rows);
    Signature signature = signature_along(handle, Operation::kCachedDispatch, dtype);
    signature.expert_alignment = handle.expert_alignment;
    signature.has_weights = arg.topk_weights.is_there;
    signature.has_scales = arg.x_scales.is_there;
    const py::gil_scoped_release released;
    self.dispatch_cached(signature, dispatch_of(self.config(), handle, arg, true));
}

void combine(ShmExchange& self, DType dtype, py::handle args, const TensorArg& combined_x, const TensorArg& combined_topk_weight_grads) {
    const HandleArg handle = handle_arg(args.attr("handle"));
    CombineArg arg;
    arg.x = tensor_of(args, "x"), arg.weights = tensor_of(args, "weights"), arg.bias = tensor_of(args, "bias");
    arg.topk_weight_grads = tensor_of(args, "topk_weight_grads"), arg.options = combine_options_of(args.attr("options"));
    arg.combined_x = combined_x, arg.combined_topk_weight_grads = combined_topk_weight_grads;
    Signature signature = signature_along(handle, Operation::kCombine, dtype);
    signature.has_topk_weight_grads = arg.topk_weight_grads.is_there;
    const py::gil_scoped_release released;
    self.combine(signature, combine_of(self.config(), handle, dtype, arg));
}

void bind_shm_exchange(py::module_& m) {
    using Released = py::call_guard<py::gil_scoped_release>;
    py::class_<ShmExchange>(m, "ShmExchange")
        .def(py::init([](int num_ranks, int ranks_per_node, int rank, int num_channels, int num_experts, int num_topk, int hidden,
                         double timeout_s) {
                 const WorkspaceConfig config{num_ranks, num_channels, num_experts, num_topk, hidden, ranks_per_node};
                 auto exchange = std::make_unique<ShmExchange>(config, rank, timeout_s);
                 exchange->set_poll(poll_signals);
                 return exchange;
             }),
             py::kw_only(), py::arg("num_ranks"), py::arg("ranks_per_node"), py::arg("rank"), py::arg("num_channels"),
             py::arg("num_experts"), py::arg("num_topk"), py::arg("hidden"), py::arg("timeout_s"))
        .def_property_readonly("path", &ShmExchange::path)
        .def_property_readonly("workspace_bytes", &ShmExchange::workspace_bytes)
        .def_property_readonly("num_calls", &ShmExchange::num_calls)
        .def("connect", &ShmExchange::connect)
        .def("seal", &ShmExchange::seal)
        .def("free", &ShmExchange::free)
        .def("refuse", &ShmExchange::refuse, Released())
        .def("abandon", &ShmExchange::abandon, Released())
        .def("plan", &plan)
        .def("dispatch", &dispatch)
        .def("dispatch_cached", &dispatch_cached)
        .def("combine", &combine);
}

}  // namespace

void bind_exchange(py::module_& m) {
    py::register_local_exception_translator(translate);
    m.attr("MAX_RANKS") = kMaxRanks;
    m.attr("MAX_TOPK") = kMaxTopk;
    m.attr("SCALE_BLOCK") = kScaleBlock;
    m.attr("ROW_ALIGNMENT") = kRowAlignment;
    bind_types(m);
    bind_shm_exchange(m);
    m.def("hurry_waits", [](bool hurry) { waits_hurry.store(hurry); });
    py::class_<Process>(m, "Process").def("is_gone", &Process::is_gone);
    m.def("running", &running);
    m.def(
        "workspace_bytes",
        [](int num_ranks, int num_channels, int num_experts, int num_topk, int hidden) {
            return WorkspaceLayout({num_ranks, num_channels, num_experts, num_topk, hidden}).total_bytes();
        },
        py::kw_only(), py::arg("num_ranks"), py::arg("num_channels"), py::arg("num_experts"), py::arg("num_topk"), py::arg("hidden"));
}

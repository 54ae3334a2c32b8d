// Binds the CPU library: the exchange between processes and its calls.
#include <system_error>

#include "bindings/tensor.h"
#include "runtime/process.h"
#include "runtime/shm/exchange.h"

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
    } catch (const CallError& e) {
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

// ---- calls: `args` and `rows` are of exchange/backends/base.py ----

TensorArg tensor_of(py::handle owner, const char* name) { return tensor_arg(owner.attr(name)); }

Layout layout_of(py::handle owner) { return owner.attr("layout").cast<std::string_view>() == "expert" ? Layout::kExpert : Layout::kRank; }

// Holds the fields of a `DispatchHandle` that a call reads.
struct HandleArg {
    const TensorArg topk_idx, recv_row_idx, recv_counts;
    const Layout layout;
    const int expert_alignment;
    const int64_t number;  // of the dispatch

    explicit HandleArg(py::handle handle)
        : topk_idx(tensor_of(handle, "topk_idx")),
          recv_row_idx(tensor_of(handle, "recv_row_idx")),
          recv_counts(tensor_of(handle, "recv_counts")),
          layout(layout_of(handle)),
          expert_alignment(handle.attr("expert_alignment").cast<int>()),
          number(*tensor_of(handle, "call").as<const int64_t*>()) {}
};

std::vector<int64_t> plan(ShmExchange& self, DType dtype, py::handle args, const TensorArg& own_counts, const TensorArg& all_counts) {
    Signature signature{Operation::kDispatch, dtype, layout_of(args), args.attr("expert_alignment").cast<int>()};
    signature.has_weights = !args.attr("topk_weights").is_none(), signature.has_scales = !args.attr("x_scales").is_none();
    const auto num_recv_rows = args.attr("num_recv_rows").cast<int64_t>();
    const py::gil_scoped_release released;
    return self.plan(signature, own_counts.as<const int32_t*>(), num_recv_rows, all_counts.as<int32_t*>());
}

DispatchParams params_of(const HandleArg& handle, py::handle args, py::handle rows, const TensorArg& recv_topk_idx, bool cached) {
    const TensorArg x = tensor_of(args, "x"), x_scales = tensor_of(args, "x_scales"), recv_x = tensor_of(rows, "recv_x");
    return {
        .layout = handle.layout,
        .cached = cached,
        .streaming = recv_x.num_rows * recv_x.row_bytes() > kStreamingBytes,
        .row_bytes = static_cast<size_t>(x.row_bytes()),
        .scale_bytes = x_scales.is_there ? static_cast<size_t>(x_scales.row_bytes()) : 0,
        .num_tokens = handle.topk_idx.num_rows,
        .x = x.as<const std::byte*>(),
        .x_scales = x_scales.as<const std::byte*>(),
        .topk_idx = handle.topk_idx.as<const int32_t*>(),
        .topk_weights = tensor_of(args, "topk_weights").as<const float*>(),
        .recv_counts = handle.recv_counts.as<const int32_t*>(),
        .recv_x = recv_x.as<std::byte*>(),
        .recv_x_scales = tensor_of(rows, "recv_x_scales").as<std::byte*>(),
        .recv_topk_idx = recv_topk_idx.as<void*>(),
        .recv_topk_idx_is_int64 = recv_topk_idx.element_bytes == 8,
        .recv_topk_weights = tensor_of(rows, "recv_topk_weights").as<float*>(),
        .recv_row_idx = handle.recv_row_idx.as<int32_t*>(),
    };
}

void dispatch(ShmExchange& self, py::handle handle, py::handle args, py::handle rows, const TensorArg& recv_topk_idx,
              const TensorArg& row_begin) {
    DispatchParams params = params_of(HandleArg(handle), args, rows, recv_topk_idx, false);
    params.row_begin = row_begin.as<const int32_t*>();
    const py::gil_scoped_release released;
    self.dispatch(params);
}

void dispatch_cached(ShmExchange& self, DType dtype, py::handle args, py::handle rows) {
    const HandleArg handle(args.attr("handle"));
    const DispatchParams params = params_of(handle, args, rows, {}, true);
    Signature signature{Operation::kCachedDispatch, dtype, handle.layout, handle.expert_alignment, handle.number};
    signature.has_weights = !args.attr("topk_weights").is_none(), signature.has_scales = !args.attr("x_scales").is_none();
    const py::gil_scoped_release released;
    self.make(signature, params);
}

void combine(ShmExchange& self, DType dtype, py::handle args, const TensorArg& combined_x, const TensorArg& combined_topk_weight_grads) {
    const HandleArg handle(args.attr("handle"));
    const TensorArg topk_weight_grads = tensor_of(args, "topk_weight_grads");
    const CombineParams params{
        .dtype = dtype,
        .layout = handle.layout,
        .recv_counts = handle.recv_counts.as<const int32_t*>(),
        .recv_row_idx = handle.recv_row_idx.as<const int32_t*>(),
        .x = tensor_of(args, "x").as<const std::byte*>(),
        .weights = tensor_of(args, "weights").as<const float*>(),
        .topk_weight_grads = topk_weight_grads.as<const float*>(),
        .num_tokens = handle.topk_idx.num_rows,
        .topk_idx = handle.topk_idx.as<const int32_t*>(),
        .bias = tensor_of(args, "bias").as<const std::byte*>(),
        .combined_x = combined_x.as<std::byte*>(),
        .combined_topk_weight_grads = combined_topk_weight_grads.as<float*>(),
        .options = combine_options_of(args.attr("options")),
    };
    Signature signature{Operation::kCombine, dtype, handle.layout, 1, handle.number};
    signature.has_topk_weight_grads = topk_weight_grads.is_there;
    const py::gil_scoped_release released;
    self.make(signature, params);
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
}

#include "autograd/by_expert.h"

namespace deepep_moe {
namespace {

TensorArg arg_of(const Tensor& tensor) {
    TensorArg arg;
    if (!tensor.defined()) return arg;
    arg.set_shape({tensor.sizes().data(), tensor.sizes().size()});
    arg.element_bytes = static_cast<int64_t>(tensor.element_size());
    if (!arg.is_empty()) arg.address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
    return arg;
}

MatrixArg matrix_of(const Tensor& tensor) {
    MatrixArg arg{arg_of(tensor)};
    if (tensor.defined()) arg.row_stride = tensor.stride(0), arg.column_stride = tensor.stride(1);
    return arg;
}

// Of rows that can be summed.
std::optional<DType> dtype_of(const Tensor& tensor) {
    switch (tensor.scalar_type()) {
        case at::kFloat: return DType::kFloat32;
        case at::kBFloat16: return DType::kBFloat16;
        case at::kHalf: return DType::kFloat16;
        default: return std::nullopt;
    }
}

GpuCalls* calls_of(const py::object& communicator) {
    const py::capsule capsule = communicator.attr("calls")();
    if (std::string_view(capsule.name()) != kGpuCallsName)
        throw py::type_error("deepep_moe._C and deepep_moe._autograd are of different builds; install deepep_moe again");
    return capsule.get_pointer<GpuCalls>();
}

}  // namespace

void raise_python() {
    python_error error;
    error.persist();
    throw error;
}

ByExpert::ByExpert(py::object communicator, const Settings& settings, at::Device device, py::object shape_of, py::object current_stream,
                   py::object abort)
    : settings(settings),
      communicator_(std::move(communicator)),
      make_shape_(std::move(shape_of)),
      current_stream_(std::move(current_stream)),
      abort_(std::move(abort)),
      calls_(calls_of(communicator_)),
      device_(device) {}

void ByExpert::release() {
    calls_ = nullptr;
    communicator_ = make_shape_ = current_stream_ = abort_ = py::none();
}

uintptr_t ByExpert::current_stream() const { return current_stream_().cast<uintptr_t>(); }

// ---- handles ----

const HandleShape& ByExpert::shape_of(int64_t num_tokens) {
    if (shape_.num_tokens == num_tokens) return shape_;  // mostly those of the call before
    HandleShape made{make_shape_(num_tokens), num_tokens};
    const py::tuple starts = made.shape.attr("starts");
    for (size_t i = 0; i < made.starts.size(); ++i) made.starts[i] = starts[i].cast<int64_t>();
    return shape_ = made;
}

HandleArg ByExpert::handle_arg(const Dispatched& handle) const {
    HandleArg arg;
    arg.call = handle.call.const_data_ptr<int64_t>();
    arg.num_rows = handle.num_rows;
    arg.unpack(reinterpret_cast<uintptr_t>(handle.memory.const_data_ptr()), handle.starts, handle.num_tokens, settings.num_topk);
    return arg;
}

const int64_t* ByExpert::counts_of(const Dispatched& handle) const {
    return handle.call.const_data_ptr<int64_t>() + handle.call.numel() - settings.num_local_experts;
}

// ---- what calls take ----

bool ByExpert::takes(const Outgoing& out, int64_t repeats) const {
    const Tensor &x = out.x, &idx = out.topk_idx, &weights = out.topk_weights;
    if (repeats < 1 || !is_here(x) || !is_here(idx) || x.dim() != 2 || idx.dim() != 2 || !x.is_contiguous() || !dtype_of(x)) return false;
    const bool has_whole_pieces = x.size(1) * x.element_size() % kRowAlignment == 0 && arg_of(x).address % kRowAlignment == 0;
    const int64_t num_tokens = x.size(0) * repeats;
    if (!has_whole_pieces || x.size(1) != settings.hidden || num_tokens > settings.num_max_tokens) return false;
    if (repeats > 1 && (settings.num_topk != 1 || repeats > kMaxTopk)) return false;
    if (idx.size(0) != num_tokens || idx.size(1) != settings.num_topk) return false;
    if (idx.scalar_type() != at::kLong && idx.scalar_type() != at::kInt) return false;
    return !weights.defined() ||
           (is_here(weights) && weights.scalar_type() == at::kFloat && weights.dim() == 2 && weights.numel() == idx.numel());
}

std::optional<PartsArg> ByExpert::parts_of(at::TensorList tensors, const Dispatched& handle) const {
    if (static_cast<int64_t>(tensors.size()) != settings.num_local_experts || tensors.size() > kMaxParts || !dtype_of(tensors[0]))
        return std::nullopt;
    TensorArg args[kMaxParts];
    for (size_t i = 0; i < tensors.size(); ++i) {
        const Tensor& tensor = tensors[i];
        if (!is_here(tensor) || tensor.scalar_type() != tensors[0].scalar_type() || !tensor.is_contiguous()) return std::nullopt;
        args[i] = arg_of(tensor);
    }
    return deepep_moe::parts_of({args, tensors.size()}, counts_of(handle), settings.hidden, handle.num_rows);
}

// Of a combine: of each row, or at the source, where rows are weighed then.
bool ByExpert::takes_weights(const Tensor& weights, const Tensor& at_source, const Dispatched& handle) const {
    const auto is_like = [&](const Tensor& tensor, at::IntArrayRef sizes) {
        return is_here(tensor) && tensor.scalar_type() == at::kFloat && tensor.is_contiguous() && tensor.sizes() == sizes;
    };
    if (weights.defined() && !is_like(weights, {handle.num_rows})) return false;
    if (!at_source.defined()) return true;
    const int64_t repeats = at_source.dim() == 2 ? at_source.size(0) : 0;
    const bool shares =
        weights.defined() && settings.num_topk == 1 && repeats > 0 && repeats <= kMaxTopk && handle.num_tokens % repeats == 0;
    return shares && is_like(at_source, {repeats, handle.num_tokens / repeats});
}

GpuWeighing ByExpert::weighing(const Tensor& weights, const Tensor& first, const PartsArg& parts, const Tensor& grad_weights) {
    return weighing_of(arg_of(weights), arg_of(first), &parts, arg_of(grad_weights), *dtype_of(first));
}

// ---- calls ----

Dispatched ByExpert::dispatch(const Outgoing& out, Tensor& recv_x, Tensor& recv_weights) {
    const HandleShape& shape = shape_of(out.topk_idx.size(0));
    Dispatched made{empty({shape.starts.back()}, at::kInt),
                    at::empty({1 + 2 * settings.num_ranks + settings.num_local_experts}, at::kLong)};
    made.num_tokens = shape.num_tokens;
    std::copy_n(shape.starts.begin(), made.starts.size(), made.starts.begin());
    GpuDispatchCall call(handle_arg(made), arg_of(out.x), {}, matrix_of(out.topk_idx), matrix_of(out.topk_weights), *dtype_of(out.x), -1);
    const auto receive = [&](int64_t num_rows, bool is_guess) {
        recv_x = empty({num_rows, settings.hidden}, out.x.scalar_type());
        if (out.topk_weights.defined()) recv_weights = empty({num_rows}, at::kFloat);
        call.receive_into(arg_of(recv_x), {}, {}, arg_of(recv_weights), is_guess);
    };
    const int64_t room = guess_.room();
    if (room >= 0) receive(room, true);
    const uintptr_t stream = current_stream();
    int64_t* const numbers = made.call.mutable_data_ptr<int64_t>();
    made.num_rows = unlocked([&](GpuCalls& calls) { return calls.dispatch(call, settings.num_sms, stream, numbers); });
    require(made.num_rows >= 0);
    if (made.num_rows > room) {  // rows wait for receivers
        try {
            receive(made.num_rows, false);
        } catch (...) {
            unlocked([](GpuCalls& calls) { calls.abandon(); });
            throw;
        }
        require(unlocked([&](GpuCalls& calls) { return calls.end_dispatch(call, stream); }));
    } else if (recv_weights.defined() && made.num_rows < room) {
        recv_weights.resize_({made.num_rows});
    }
    guess_.remember(made.num_rows);
    return made;
}

Tensor ByExpert::dispatch_cached(const Dispatched& handle, const Tensor& x, const GpuWeighing* weighing) {
    const Tensor recv_x = empty({handle.num_rows, settings.hidden}, x.scalar_type());
    GpuDispatchCall call(handle_arg(handle), arg_of(x), {}, {}, {}, *dtype_of(x), -1);
    call.receive_into(arg_of(recv_x), {}, {}, {}, false);
    if (weighing != nullptr) call.params.weighing = *weighing;
    const uintptr_t stream = current_stream();
    require(unlocked([&](GpuCalls& calls) { return calls.dispatch_cached(call, settings.num_sms, stream); }));
    return recv_x;
}

std::pair<Tensor, Tensor> ByExpert::combine(const Dispatched& handle, const Tensor& first, const PartsArg& parts, const Tensor& weights,
                                            const Tensor& lane_values, const Tensor& at_source, int64_t repeats) {
    const Tensor combined_x = empty({handle.num_tokens / repeats, settings.hidden}, first.scalar_type());
    const Tensor combined_values = lane_values.defined() ? empty({handle.num_tokens, settings.num_topk}, at::kFloat) : Tensor();
    const GpuCombineCall call(handle_arg(handle), arg_of(first), &parts, arg_of(at_source.defined() ? Tensor() : weights), {},
                              arg_of(lane_values), arg_of(at_source), arg_of(combined_x), arg_of(combined_values), *dtype_of(first), false);
    const uintptr_t stream = current_stream();
    require(unlocked([&](GpuCalls& calls) { return calls.combine(call, settings.num_sms_of_sums, stream); }));
    return {combined_x, combined_values};
}

// ---- failures ----

void ByExpert::require(bool was_made) {
    if (was_made) return;
    const py::object method = py::reinterpret_steal<py::object>(PyObject_GetAttrString(communicator_.ptr(), "raise_failure"));
    if (method) py::reinterpret_steal<py::object>(PyObject_CallNoArgs(method.ptr()));
    raise_python();
}

// The exception that is being handled, as Python's.
void ByExpert::raise_again(bool tells) {
    torch::translate_exception_to_python(std::current_exception());
    if (tells) {
        py::error_scope kept;  // the error, until the peers have been told
        PyErr_NormalizeException(&kept.type, &kept.value, &kept.trace);
        try {
            abort_(py::handle(kept.value));
        } catch (const py::error_already_set&) {  // the GPU has failed: the first error says why
        }
    }
    raise_python();
}

}  // namespace deepep_moe

#include "torch/low_latency.h"

#include "common/low_latency_call.h"

namespace deepep_moe {
namespace {

bool is_text(py::handle object, const char* text) {
    return PyUnicode_CheckExact(object.ptr()) && PyUnicode_CompareWithASCIIString(object.ptr(), text) == 0;
}

bool is_contiguous_like(const Tensor& tensor, at::IntArrayRef sizes) { return tensor.sizes() == sizes && tensor.is_contiguous(); }

}  // namespace

LowLatencyCalls::LowLatencyCalls(py::object shim, const Settings& settings, Tensor statistics)
    : settings_(settings),
      owner_(std::move(shim)),
      shim_(shim_in<LowLatencyShim>(owner_.attr("capsule")(), kLowLatencyShimName)),
      statistics_(std::move(statistics)),
      number_(at::empty({1}, statistics_.options())) {}

void LowLatencyCalls::release() {
    shim_ = nullptr;
    owner_ = py::none();
}

// ---- what calls take ----

bool LowLatencyCalls::are_rows(const Tensor& x, at::IntArrayRef sizes) const {
    return is_on(statistics_.device(), x) && can_be_summed(x.scalar_type()) && is_contiguous_like(x, sizes) && !needs_gradients({&x}) &&
           settings_.hidden * x.element_size() % kRowAlignment == 0 && is_aligned(x);
}

bool LowLatencyCalls::takes(const Tensor& x, const Tensor& topk_idx, const Tensor& topk_weights) const {
    if (!x.defined() || x.dim() != 2 || x.size(0) > settings_.num_max_tokens || !are_rows(x, {x.size(0), settings_.hidden})) return false;
    const int64_t lanes[] = {x.size(0), settings_.num_topk};
    if (!is_on(x.device(), topk_idx) || !is_contiguous_like(topk_idx, lanes)) return false;
    if (topk_idx.scalar_type() != at::kLong && topk_idx.scalar_type() != at::kInt) return false;
    return are_weights(topk_weights, x.size(0));
}

bool LowLatencyCalls::are_weights(const Tensor& topk_weights, int64_t num_tokens) const {
    const int64_t lanes[] = {num_tokens, settings_.num_topk};
    return !topk_weights.defined() || (is_on(statistics_.device(), topk_weights) && topk_weights.scalar_type() == at::kFloat &&
                                       is_contiguous_like(topk_weights, lanes) && !needs_gradients({&topk_weights}));
}

// ---- calls ----

LowLatencyCalls::Received LowLatencyCalls::receive_buffers(at::ScalarType type, bool fp8, bool is_rounded) const {
    const int64_t num_experts = settings_.num_local_experts, capacity = settings_.num_ranks * settings_.num_max_tokens;
    Received made;
    made.x = empty({num_experts, capacity, settings_.hidden}, fp8 ? at::kFloat8_e4m3fn : type);
    if (fp8) {
        const int64_t columns_each = kScaleBlock * (is_rounded ? 4 : 1), num_columns = (settings_.hidden + columns_each - 1) / columns_each;
        made.x_scales = empty({num_experts, num_columns, capacity}, is_rounded ? at::kInt : at::kFloat);
    }
    made.counts = empty({num_experts}, at::kInt);
    const c10::InferenceMode counts_changes(false);  // in which PyTorch counts changes in place
    made.state = empty({settings_.handle_bytes}, at::kByte);
    return made;
}

py::object LowLatencyCalls::dispatch(py::handle x, py::handle topk_idx, py::handle topk_weights, py::handle fp8, py::handle scale_format,
                                     uintptr_t stream) {
    if (!are_plain({x, topk_idx, topk_weights}) || !is_ready()) return py::none();
    const bool is_fp8 = fp8.ptr() == Py_True, is_rounded = is_text(scale_format, "ue8m0");
    if ((!is_fp8 && fp8.ptr() != Py_False) || (is_rounded ? !is_fp8 : !is_text(scale_format, "fp32"))) return py::none();
    if (is_fp8 && settings_.hidden % kScaleBlock != 0) return py::none();
    const Tensor rows = unpacked(x), idx = unpacked(topk_idx), weights = unpacked(topk_weights);
    if (!takes(rows, idx, weights)) return py::none();
    Received made;
    try {
        made = receive_buffers(rows.scalar_type(), is_fp8, is_rounded);
    } catch (const c10::Error&) {
        return py::none();  // Python will find the same, and tells the peers
    }
    const auto params =
        low_latency_dispatch_of(arg_of(rows), arg_of(idx), arg_of(weights), arg_of(made.state), arg_of(made.x), arg_of(made.x_scales),
                                arg_of(made.counts), arg_of(statistics_), dtype_of(rows.scalar_type()), is_rounded);
    call_unlocked(owner_, *shim_, [&](LowLatencyShim& shim) { return shim.dispatch(params, stream); });
    if (is_fp8) made.x_scales = made.x_scales.transpose(1, 2);
    return py::make_tuple(rows.size(0), made.x, packed(made.x_scales), made.counts, made.state);
}

py::object LowLatencyCalls::combine(py::handle x, py::handle state, int64_t num_tokens, py::handle topk_weights, py::handle out,
                                    py::handle wire, uintptr_t stream) {
    if (!are_plain({x, state, topk_weights, out}) || !is_ready()) return py::none();
    const bool fp8 = is_text(wire, "fp8");
    if (fp8 ? settings_.hidden % kScaleBlock != 0 : !wire.is_none()) return py::none();
    const Tensor rows = unpacked(x), memory = unpacked(state), weights = unpacked(topk_weights);
    const int64_t sizes[] = {num_tokens, settings_.hidden};
    if (!are_rows(rows, {settings_.num_local_experts, settings_.num_ranks * settings_.num_max_tokens, settings_.hidden})) return py::none();
    if (!are_weights(weights, num_tokens) || !is_on(statistics_.device(), memory)) return py::none();
    Tensor combined_x = unpacked(out);
    if (combined_x.defined() && (!are_rows(combined_x, sizes) || combined_x.scalar_type() != rows.scalar_type())) return py::none();
    try {
        if (!combined_x.defined()) combined_x = empty(sizes, rows.scalar_type());
    } catch (const c10::Error&) {
        return py::none();  // as in dispatch
    }
    const auto params = low_latency_combine_of(arg_of(rows), arg_of(memory), arg_of(weights), arg_of(number_), arg_of(combined_x),
                                               arg_of(statistics_), dtype_of(rows.scalar_type()), fp8);
    call_unlocked(owner_, *shim_, [&](LowLatencyShim& shim) { return shim.combine(params, stream); });
    return py::cast(combined_x);
}

}  // namespace deepep_moe

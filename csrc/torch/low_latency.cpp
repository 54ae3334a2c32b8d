// Makes a low-latency buffer's calls on GPUs, with PyTorch's tensors: the only way from Python to csrc/runtime/nvlink/low_latency. C++ says
// yes or no to the arguments of a call; where it says no, Python finds out what is wrong with them.
#include <memory>
#include <optional>

#include "runtime/nvlink/shim.h"
#include "torch/streams.h"

namespace deepep_moe {
namespace {

struct LowLatencyReceived : InFlight {
    Tensor x, x_scales, counts, state;
    int64_t num_tokens = 0;  // tokens of this rank
};

struct LowLatencyCombined : InFlight {
    Tensor x;
};

bool is_text(py::handle object, const char* text) {
    return PyUnicode_Check(object.ptr()) && PyUnicode_CompareWithASCIIString(object.ptr(), text) == 0;
}

bool is_true(py::handle object) {
    const int is = PyObject_IsTrue(object.ptr());
    if (is < 0) throw py::error_already_set();
    return is == 1;
}

// Others may raise an error when they are asked.
bool are_bools(std::initializer_list<py::handle> objects) {
    return std::all_of(objects.begin(), objects.end(), [](py::handle object) { return PyBool_Check(object.ptr()); });
}

// Callers hold the GIL.
class LowLatencyCalls : public std::enable_shared_from_this<LowLatencyCalls> {
public:
    // owner: `_C.NvlinkLowLatency`. statistics: of the buffer, on its device.
    LowLatencyCalls(py::object owner, Tensor statistics)
        : owner_(std::move(owner)),
          shim_(shim_in<LowLatencyShim>(owner_.attr("shim")())),
          sizes_(shim_->sizes()),
          handle_bytes_(shim_->bytes_of_handle()),
          statistics_(std::move(statistics)),
          number_(at::empty({1}, statistics_.options())),
          own_(statistics_.device()) {}

    void release() {  // the communicator: of a buffer that is destroyed
        shim_ = nullptr;
        owner_ = py::none();
    }

    // Takes the arguments of the Python methods. Returns nothing if C++ does not take one of them, unless Python has checked the call
    // (`is_checked`).
    std::optional<LowLatencyReceived> dispatch(py::handle x, py::handle topk_idx, py::handle topk_weights, py::handle fp8,
                                               py::handle scale_format, py::handle async_op, py::handle return_hook, bool is_checked) {
        if (!is_checked && !(are_plain({x, topk_idx, topk_weights}) && are_bools({fp8, async_op, return_hook}) && is_ready()))
            return std::nullopt;
        const Tensor rows = unpacked(x), idx = unpacked(topk_idx), weights = unpacked(topk_weights);
        const bool is_fp8 = is_true(fp8), is_rounded = is_text(scale_format, "ue8m0");
        if (!is_checked) {
            if (is_fp8 ? sizes_.hidden % kScaleBlock != 0 : is_rounded) return std::nullopt;
            if ((!is_rounded && !is_text(scale_format, "fp32")) || !takes(rows, idx, weights)) return std::nullopt;
        }
        LowLatencyReceived received;
        received.num_tokens = rows.size(0);
        try {
            receive_into(received, rows.scalar_type(), is_fp8, is_rounded);
        } catch (const c10::Error&) {
            if (is_checked) throw;
            return std::nullopt;  // Python will find the same, and tells the peers
        }
        LowLatencyDispatchParams params{};
        params.what.dtype = dtype_of(rows.scalar_type());
        params.what.fp8 = is_fp8, params.what.is_rounded = is_rounded, params.what.has_weights = weights.defined();
        params.statistics = data_of<int64_t>(statistics_);
        params.is_int64 = idx.scalar_type() == at::kLong;
        params.num_tokens = static_cast<int>(received.num_tokens);
        params.x = data_of<std::byte>(rows), params.topk_idx = data_of<void>(idx), params.topk_weights = data_of<float>(weights);
        params.handle = data_of<std::byte>(received.state);
        params.recv_x = data_of<std::byte>(received.x), params.recv_x_scales = data_of<void>(received.x_scales);
        params.num_recv_tokens_per_expert = data_of<int32_t>(received.counts);
        run(received, async_op, return_hook,
            {rows, idx, weights, received.state, received.x, received.x_scales, received.counts, statistics_}, params);
        if (is_fp8) received.x_scales = received.x_scales.transpose(1, 2);
        return received;
    }

    // state, num_tokens: of the handle.
    std::optional<LowLatencyCombined> combine(py::handle x, py::handle state, int64_t num_tokens, py::handle topk_weights, py::handle out,
                                              py::handle wire, py::handle async_op, py::handle return_hook, bool is_checked) {
        if (!is_checked && !(are_plain({x, state, topk_weights, out}) && are_bools({async_op, return_hook}) && is_ready()))
            return std::nullopt;
        const Tensor rows = unpacked(x), memory = unpacked(state), weights = unpacked(topk_weights);
        LowLatencyCombined combined;
        combined.x = unpacked(out);
        const int64_t sizes[] = {num_tokens, sizes_.hidden};
        const bool fp8 = is_text(wire, "fp8");
        if (!is_checked) {
            if (fp8 ? sizes_.hidden % kScaleBlock != 0 : !wire.is_none()) return std::nullopt;
            if (!are_rows(rows, {sizes_.num_local_experts, sizes_.rows_of_expert(), sizes_.hidden})) return std::nullopt;
            if (!are_weights(weights, num_tokens) || !is_on(statistics_.device(), memory)) return std::nullopt;
            if (combined.x.defined() && (!are_rows(combined.x, sizes) || combined.x.scalar_type() != rows.scalar_type()))
                return std::nullopt;
        }
        Tensor number = number_;
        try {
            if (!combined.x.defined()) combined.x = empty(sizes, rows.scalar_type());
            if (is_true(return_hook)) number = empty({1}, at::kLong);  // another combine may come before the second half
        } catch (const c10::Error&) {
            if (is_checked) throw;
            return std::nullopt;  // as in dispatch
        }
        LowLatencyCombineParams params{};
        params.what.dtype = dtype_of(rows.scalar_type());
        params.what.fp8 = fp8, params.what.has_weights = weights.defined();
        params.statistics = data_of<int64_t>(statistics_);
        params.num_tokens = static_cast<int>(num_tokens);
        params.handle = data_of<std::byte>(memory), params.call = data_of<std::byte>(number);
        params.topk_weights = data_of<float>(weights);
        params.x = data_of<std::byte>(rows), params.combined_x = data_of<std::byte>(combined.x);
        keep_for_current(statistics_.device(), {memory});  // on its dispatch's stream or another: the caller may drop the handle at once
        run(combined, async_op, return_hook, {rows, memory, weights, number, combined.x, statistics_}, params);
        return combined;
    }

private:
    // ---- what calls take ----

    bool is_ready() const { return !is_watched() && shim_ != nullptr && shim_->is_ready(); }

    bool is_here(const Tensor& tensor, at::ScalarType type, at::IntArrayRef sizes) const {
        return has_form(statistics_.device(), tensor, type, sizes);
    }

    bool are_rows(const Tensor& x, at::IntArrayRef sizes) const {
        return x.defined() && can_be_summed(x.scalar_type()) && is_here(x, x.scalar_type(), sizes) && !needs_gradients({&x}) &&
               sizes_.hidden * x.element_size() % kRowAlignment == 0 && is_aligned(x);
    }

    bool takes(const Tensor& x, const Tensor& topk_idx, const Tensor& topk_weights) const {
        if (!x.defined() || x.dim() != 2 || x.size(0) > sizes_.num_max_tokens || !are_rows(x, {x.size(0), sizes_.hidden})) return false;
        return topk_idx.defined() && is_index(topk_idx.scalar_type()) &&
               is_here(topk_idx, topk_idx.scalar_type(), {x.size(0), sizes_.num_topk}) && are_weights(topk_weights, x.size(0));
    }

    bool are_weights(const Tensor& topk_weights, int64_t num_tokens) const {
        return !topk_weights.defined() ||
               (is_here(topk_weights, at::kFloat, {num_tokens, sizes_.num_topk}) && !needs_gradients({&topk_weights}));
    }

    // ---- calls ----

    Tensor empty(at::IntArrayRef sizes, at::ScalarType type) const { return at::empty(sizes, statistics_.options().dtype(type)); }

    // Makes both halves of a call, or the first. tensors: all of the call.
    template <class Params>
    void run(InFlight& in_flight, py::handle async_op, py::handle return_hook, variable_list tensors, const Params& params) {
        TORCH_CHECK(shim_ != nullptr, "the buffer was destroyed");
        const bool is_split = is_true(return_hook), is_beside = !is_split && is_true(async_op);
        const at::Device device = statistics_.device();
        const uintptr_t stream = is_beside ? own_.follow() : call_stream(device);
        try {
            call_unlocked(owner_, *shim_, [&](LowLatencyShim& shim) { return shim.make(params, true, !is_split, stream); });
        } catch (...) {
            if (is_beside) own_.keep(tensors);  // the stream goes on with the tensors that it was given
            throw;
        }
        if (is_beside) in_flight.recorded = own_.record(std::move(tensors));
        if (!is_split) return;
        in_flight.second_half =
            std::make_shared<SecondHalf>([self = shared_from_this(), device, tensors = std::move(tensors), params, stream] {
                if (self->shim_ == nullptr) return false;
                const uintptr_t now = call_stream(device);
                if (now != stream) keep_for_current(device, tensors);
                call_unlocked(self->owner_, *self->shim_, [&](LowLatencyShim& shim) { return shim.make(params, false, true, now); });
                return true;
            });
    }

    void receive_into(LowLatencyReceived& received, at::ScalarType type, bool fp8, bool is_rounded) const {
        const int64_t num_experts = sizes_.num_local_experts, capacity = sizes_.rows_of_expert();
        received.x = empty({num_experts, capacity, sizes_.hidden}, fp8 ? at::kFloat8_e4m3fn : type);
        if (fp8) {
            const int64_t columns_each = kScaleBlock * (is_rounded ? 4 : 1),
                          num_columns = (sizes_.hidden + columns_each - 1) / columns_each;
            received.x_scales = empty({num_experts, num_columns, capacity}, is_rounded ? at::kInt : at::kFloat);
        }
        received.counts = empty({num_experts}, at::kInt);
        const c10::InferenceMode counts_changes(false);  // in which PyTorch counts changes in place
        received.state = empty({handle_bytes_}, at::kByte);
    }

    py::object owner_;
    LowLatencyShim* shim_;
    const LowLatencyConfig sizes_;
    const int64_t handle_bytes_;
    const Tensor statistics_, number_;  // number_: of a combine, which kernels on one stream after another write
    OwnStream own_;
};

}  // namespace

void bind_low_latency(py::module_& m) {
    using torch::wrap_pybind_function;
    py::class_<LowLatencyReceived, InFlight>(m, "LowLatencyReceived")
        .def_readonly("num_tokens", &LowLatencyReceived::num_tokens)
        .def_readonly("recv_x", &LowLatencyReceived::x)
        .def_readonly("recv_x_scales", &LowLatencyReceived::x_scales)
        .def_readonly("num_recv_tokens_per_expert", &LowLatencyReceived::counts)
        .def_readonly("state", &LowLatencyReceived::state);
    py::class_<LowLatencyCombined, InFlight>(m, "LowLatencyCombined").def_readonly("combined_x", &LowLatencyCombined::x);
    py::class_<LowLatencyCalls, std::shared_ptr<LowLatencyCalls>>(m, "LowLatencyCalls")
        .def(py::init<py::object, Tensor>(), py::arg("owner"), py::arg("statistics"))
        .def("release", &LowLatencyCalls::release)
        .def("dispatch", wrap_pybind_function(&LowLatencyCalls::dispatch))
        .def("combine", wrap_pybind_function(&LowLatencyCalls::combine));
}

}  // namespace deepep_moe

// Binds the GPU library: its exchange, low-latency calls, and kernels of one GPU.
#include <algorithm>
#include <numeric>
#include <vector>

#include "bindings/tensor.h"
#include "cuda/launch.h"
#include "runtime/nvlink/guarded.h"

using namespace deepep_moe;

void bind_gpu_gate(py::module_& m);
// Functions of `KernelShim`, in gate.cpp.
bool gate_forward(GpuGateParams params, uintptr_t stream) noexcept;
bool gate_backward(const GpuGateBackwardParams& params, uintptr_t stream) noexcept;
bool may_capture(uintptr_t stream) noexcept;

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
        .def_readwrite("num_sms_of_sums", &GpuTuning::num_sms_of_sums)
        .def_readwrite("max_sms", &GpuTuning::max_sms)
        .def_readwrite("num_rail_sms", &GpuTuning::num_rail_sms);
}

// Arguments count all nodes, and the tokens of one rank. The config counts one node, and the tokens that a rank serves, each node's share
// rounded up to kReducedSlots.
GpuWorkspaceConfig config_of(int num_ranks, int num_experts, int num_topk, int hidden, int64_t num_max_tokens, int num_nodes, int node,
                             bool is_by_lane, int64_t expert_slot_bytes) {
    if (num_nodes < 1 || num_nodes > kMaxGpuNodes)
        throw std::invalid_argument("num_nodes is " + std::to_string(num_nodes) + "; it must be 1 to " + std::to_string(kMaxGpuNodes));
    if (num_nodes > 1) num_max_tokens = num_nodes * divide_up(num_max_tokens, kReducedSlots) * kReducedSlots;
    return {num_ranks / num_nodes, num_experts / num_nodes, num_topk, hidden, num_max_tokens, num_nodes, node, is_by_lane,
            expert_slot_bytes};
}

// rows: [num_topk, num_tokens, hidden]. The weights lie in memory by top-k entry or by token.
GpuWeightedSumParams weighted_sum_of(const TensorArg& rows, const TensorArg& weights, bool is_by_token, DType dtype) {
    GpuWeightedSumParams params{};
    params.num_topk = static_cast<int>(rows.num_leading);
    params.num_tokens = rows.inner_rows;
    params.hidden = rows.num_columns;
    params.lane_stride = is_by_token ? 1 : params.num_tokens;
    params.token_stride = is_by_token ? params.num_topk : 1;
    params.dtype = dtype;
    params.rows = rows.as<const std::byte*>();
    params.weights = weights.as<const float*>();
    return params;
}

void weighted_sum(const TensorArg& rows, const TensorArg& weights, bool is_by_token, bool is_fused, const TensorArg& sums, DType dtype,
                  uintptr_t stream) {
    GpuWeightedSumParams params = weighted_sum_of(rows, weights, is_by_token, dtype);
    params.is_fused = is_fused;
    params.sums = sums.as<std::byte*>();
    launch_weighted_sum(params, as_stream(stream));
}

void weighted_sum_backward(const TensorArg& rows, const TensorArg& weights, bool is_by_token, const TensorArg& grad,
                           const TensorArg& grad_rows, const TensorArg& grad_weights, DType dtype, uintptr_t stream) {
    GpuWeightedSumParams params = weighted_sum_of(rows, weights, is_by_token, dtype);
    params.grad = grad.as<const std::byte*>();
    params.grad_rows = grad_rows.as<std::byte*>();
    params.grad_weights = grad_weights.as<float*>();
    launch_weighted_sum_backward(params, as_stream(stream));
}

void quantize(const TensorArg& x, const TensorArg& y, const TensorArg& scales, bool is_rounded, DType dtype, uintptr_t stream) {
    launch_quantize({x.num_rows, x.num_columns, dtype, x.as<const std::byte*>(), y.as<std::byte*>(), scales.as<float*>(), is_rounded},
                    as_stream(stream));
}

// b: [num_groups, n, k], or [k, num_rows] for a gradient [num_groups, n, k].
GpuFp8ProductParams fp8_product_of(const TensorArg& a, const TensorArg& a_scales, const TensorArg& b, const TensorArg& b_scales,
                                   const TensorArg& group_ends, const TensorArg& out) {
    GpuFp8ProductParams params{};
    params.num_groups = static_cast<int>(group_ends.num_rows);
    params.a = a.as<const std::byte*>(), params.b = b.as<const std::byte*>();
    params.a_scales = a_scales.as<const float*>(), params.b_scales = b_scales.as<const float*>();
    params.group_ends = group_ends.as<const int*>();
    params.out = out.as<void*>();
    return params;
}

void fp8_product(const TensorArg& x, const TensorArg& x_scales, const TensorArg& w, const TensorArg& w_scales, const TensorArg& group_ends,
                 const TensorArg& y, uintptr_t stream) {
    GpuFp8ProductParams params = fp8_product_of(x, x_scales, w, w_scales, group_ends, y);
    params.num_rows = x.num_rows;
    params.n = static_cast<int>(y.num_columns), params.k = static_cast<int>(x.num_columns);
    launch_fp8_product(params, as_stream(stream));
}

void fp8_weight_gradient(const TensorArg& dy, const TensorArg& dy_scales, const TensorArg& x, const TensorArg& x_scales,
                         const TensorArg& group_ends, const TensorArg& out, bool is_fp32, uintptr_t stream) {
    GpuFp8ProductParams params = fp8_product_of(dy, dy_scales, x, x_scales, group_ends, out);
    params.num_rows = x.num_columns;
    params.n = static_cast<int>(dy.num_rows), params.k = static_cast<int>(x.num_rows);
    params.is_fp32 = is_fp32;
    launch_fp8_weight_gradient(params, as_stream(stream));
}

void quantize_weights(const TensorArg& w, int64_t matrix_stride, const TensorArg& y, const TensorArg& scales, const TensorArg& y_t,
                      const TensorArg& scales_t, DType dtype, uintptr_t stream) {
    launch_quantize_weights({w.num_leading, w.inner_rows, w.num_columns, matrix_stride, dtype, w.as<const std::byte*>(), y.as<std::byte*>(),
                             scales.as<float*>(), y_t.as<std::byte*>(), scales_t.as<float*>()},
                            as_stream(stream));
}

bool add_weight_gradients(const TensorArg& grads, const TensorArg& rows, const TensorArg& group_ends, const TensorArg& sums,
                          uintptr_t stream) {
    return launch_add_weight_gradients(weight_gradients_of(grads, rows, group_ends, sums), as_stream(stream));
}

void clear_tail(const TensorArg& values, const TensorArg& group_ends, uintptr_t stream) {
    launch_clear_tail({values.num_rows, values.row_bytes(), group_ends.as<const int*>(), group_ends.num_rows, values.as<std::byte*>()},
                      as_stream(stream));
}

void swiglu(const TensorArg& inner, const TensorArg& probs, const TensorArg& group_ends, const TensorArg& y, DType dtype,
            uintptr_t stream) {
    launch_swiglu(swiglu_of(inner, probs, group_ends, y, dtype), as_stream(stream));
}

void swiglu_backward(const TensorArg& inner, const TensorArg& probs, const TensorArg& group_ends, const TensorArg& y, const TensorArg& grad,
                     const TensorArg& grad_inner, const TensorArg& grad_probs, DType dtype, uintptr_t stream) {
    GpuSwigluParams params = swiglu_of(inner, probs, group_ends, y, dtype);
    params.grad = grad.as<const std::byte*>();
    params.grad_inner = grad_inner.as<std::byte*>();
    params.grad_probs = grad_probs.as<float*>();
    launch_swiglu_backward(params, as_stream(stream));
}

// Returns to csrc/torch whether the kernel could be launched.
template <auto kLaunch, class Params>
bool launched(const Params& params, uintptr_t stream) noexcept {
    try {
        if constexpr (std::is_void_v<decltype(kLaunch(params, as_stream(stream)))>)
            return kLaunch(params, as_stream(stream)), true;
        else
            return kLaunch(params, as_stream(stream));
    } catch (const std::exception&) {
        return false;
    }
}

py::capsule kernel_shim() {
    static const KernelShim shim{&gate_forward,
                                 &gate_backward,
                                 &may_capture,
                                 &launched<launch_swiglu, GpuSwigluParams>,
                                 &launched<launch_swiglu_backward, GpuSwigluParams>,
                                 &launched<launch_add_weight_gradients, GpuWeightGradientParams>,
                                 &launched<launch_lanes_of_map, LanesOfMapParams>,
                                 &launched<launch_dense_of_lanes, DenseOfLanesParams>,
                                 &launched<launch_count_lanes, CountLanesParams>};
    return py::capsule(&shim, KernelShim::kName);
}

void bind_rows(py::module_& m) {
    m.def("gpu_swiglu", &swiglu);
    m.def("gpu_swiglu_backward", &swiglu_backward);
    m.def("gpu_fp8_product", &fp8_product);
    m.def("gpu_fp8_weight_gradient", &fp8_weight_gradient);
    m.def("gpu_add_weight_gradients", &add_weight_gradients);
    m.def("gpu_clear_tail", &clear_tail);
    m.def("gpu_kernel_shim", &kernel_shim);
    m.def("gpu_weighted_sum", &weighted_sum);
    m.def("gpu_weighted_sum_backward", &weighted_sum_backward);
    m.def("gpu_quantize", &quantize);
    m.def("gpu_quantize_weights", &quantize_weights);
}

// Returns the largest divisor of `number` that is at most `most`.
int64_t largest_divisor(int64_t number, int64_t most) {
    int64_t divisor = std::min(number, most);
    while (number % divisor != 0) --divisor;
    return divisor;
}

// Moves between slots [num_slots, elements] in the expert slots and home [num_local_experts, elements], whose entries are home_strides
// elements apart. Weights are bytes. A number of elements is a multiple of kStep.
void move_experts(GuardedExchange& self, const TensorArg& copies, const std::vector<TensorArg>& slots, const std::vector<TensorArg>& home,
                  const std::vector<int64_t>& home_strides, bool returns, DType slot_dtype, DType home_dtype, int num_sms,
                  uintptr_t stream) {
    const int64_t kStep = returns ? 8 : kRowAlignment, kMostSteps = returns ? 128 : 1024;
    if (slots.empty() || slots.size() != home.size() || home_strides.size() != home.size() || slots.size() > kMaxSlotTensors)
        throw std::invalid_argument("not 1 to 8 tensors");
    GpuExpertSlotsParams params{};
    params.returns = returns;
    params.copies = copies.as<const int32_t*>();
    params.slot_dtype = slot_dtype, params.home_dtype = home_dtype;
    params.num_slots = static_cast<int>(slots[0].num_rows);
    params.num_local_experts = static_cast<int>(home[0].num_rows);
    params.num_tensors = static_cast<int>(slots.size());
    int64_t common = 0;
    for (const TensorArg& tensor : slots) common = std::gcd(common, tensor.num_columns / kStep);
    params.unit = kStep * largest_divisor(common, kMostSteps);
    uint64_t digest = params.num_slots + 257 * params.num_local_experts + static_cast<int>(slot_dtype);
    for (int i = 0; i < params.num_tensors; ++i) {
        params.tensors[i] = {static_cast<int64_t>(slots[i].address - self.workspace()), slots[i].num_columns / params.unit,
                             home[i].as<std::byte*>(), home_strides[i] * home[i].element_bytes};
        for (const int64_t number : {params.tensors[i].slots, slots[i].row_bytes()})
            digest = (digest ^ static_cast<uint64_t>(number)) * 0x9e3779b97f4a7c15ull, digest ^= digest >> 32;
    }
    Signature signature{Operation::kExpertSlots, slot_dtype, Layout::kRank};
    signature.handle_call = static_cast<int64_t>(digest & 0x7fffffff);
    signature.has_topk_weight_grads = returns;
    self.move_experts(params, signature, {.num_sms = num_sms, .stream = stream});
}

// Binds what the exchange and the low-latency calls of GPUs have in common.
template <class T>
py::class_<T, Unlocked<T>> bind_calls(py::module_& m, const char* name) {
    using Released = py::call_guard<py::gil_scoped_release>;
    return py::class_<T, Unlocked<T>>(m, name)
        .def_property_readonly("workspace_bytes", &T::workspace_bytes)
        .def_property_readonly("num_calls", &T::num_calls)
        .def("handle", [](const T& self) { return py::bytes(self.handle()); })
        .def("share", &T::share)
        .def("connect", &T::connect)
        .def("disconnect", &T::disconnect, Released())
        .def("free", &T::free, Released())
        .def("resume", &T::resume, Released())
        .def("leak", [](const py::object& self) { self.inc_ref(); })
        .def_property_readonly("rail_bytes", &T::rail_bytes)
        .def("attach_rail",
             [](T& self, const py::capsule& shim, const std::vector<uintptr_t>& addresses, const std::vector<int>& pes) {
                 self.attach_rail(*static_cast<const RailShim*>(PyCapsule_GetPointer(shim.ptr(), kRailShimName)), addresses, pes);
             })
        .def("refuse", &T::refuse, Released())
        .def("check", &T::check, Released())
        .def("shim", [](T& self) { return py::capsule(static_cast<typename T::Shim*>(&self), T::kName); })
        .def_static("raise_failure", &T::raise_failure);
}

void bind_low_latency_calls(py::module_& m) {
    using Released = py::call_guard<py::gil_scoped_release>;
    bind_calls<GuardedLowLatency>(m, "NvlinkLowLatency")
        .def(py::init([](int num_ranks, int rank, int device, int num_experts, int num_topk, int hidden, int64_t num_max_tokens, int lanes,
                         double timeout_s, bool mask_stalled, int ranks_per_node) {
                 const LowLatencyConfig config{num_ranks, num_experts, num_topk, hidden, num_max_tokens, lanes};
                 return Unlocked<GuardedLowLatency>(new GuardedLowLatency(config, rank, device, timeout_s, mask_stalled, ranks_per_node));
             }),
             py::kw_only(), py::arg("num_ranks"), py::arg("rank"), py::arg("device"), py::arg("num_experts"), py::arg("num_topk"),
             py::arg("hidden"), py::arg("num_max_tokens"), py::arg("lanes"), py::arg("timeout_s"), py::arg("mask_stalled"),
             py::arg("ranks_per_node"))
        .def_property_readonly("handle_bytes", &NvlinkLowLatency::handle_bytes)
        .def_property_readonly("failed_mark", &NvlinkLowLatency::failed_mark)
        .def_property_readonly("masks", &NvlinkLowLatency::masks)
        .def_readwrite("num_blocks", &NvlinkLowLatency::num_blocks)
        .def("mask", &NvlinkLowLatency::mask, Released())
        .def("rejoin", &NvlinkLowLatency::rejoin, Released());
}

}  // namespace

void bind_gpu(py::module_& m) {
    using Released = py::call_guard<py::gil_scoped_release>;
    m.attr("MAX_GPU_RANKS") = kMaxGpuRanks;
    m.attr("MAX_GPU_NODES") = kMaxGpuNodes;
    bind_tuning(m);
    bind_rows(m);
    m.attr("SHIM_BYTES") = kShimBytes;
    bind_calls<GuardedExchange>(m, "NvlinkExchange")
        .def(py::init([](int num_ranks, int rank, int device, int num_experts, int num_topk, int hidden, int64_t num_max_tokens,
                         double timeout_s, int num_nodes, int node, bool is_by_lane, int64_t expert_slot_bytes) {
                 const GpuWorkspaceConfig config =
                     config_of(num_ranks, num_experts, num_topk, hidden, num_max_tokens, num_nodes, node, is_by_lane, expert_slot_bytes);
                 Unlocked<GuardedExchange> exchange(new GuardedExchange(config, rank, device, timeout_s));
                 exchange->set_poll(poll_signals);
                 return exchange;
             }),
             py::kw_only(), py::arg("num_ranks"), py::arg("rank"), py::arg("device"), py::arg("num_experts"), py::arg("num_topk"),
             py::arg("hidden"), py::arg("num_max_tokens"), py::arg("timeout_s"), py::arg("num_nodes") = 1, py::arg("node") = 0,
             py::arg("is_by_lane") = false, py::arg("expert_slot_bytes") = 0)
        .def_property_readonly("is_void", &NvlinkExchange::is_void)
        .def_property_readonly("num_multiprocessors", &NvlinkExchange::num_multiprocessors)
        .def_readwrite("tuning", &NvlinkExchange::tuning)
        .def_readwrite("allows_excess", &NvlinkExchange::allows_excess)
        .def("leave", &NvlinkExchange::leave, Released())
        .def("settle", &NvlinkExchange::settle, Released())
        .def("move_experts", &move_experts, py::kw_only(), py::arg("copies"), py::arg("slots"), py::arg("home"), py::arg("home_strides"),
             py::arg("returns"), py::arg("slot_dtype"), py::arg("home_dtype"), py::arg("num_sms"), py::arg("stream"), Released())
        .def_property_readonly("expert_slots", &NvlinkExchange::expert_slots)
        .def("check_untold", &NvlinkExchange::check_untold);
    m.def(
        "gpu_workspace_bytes",
        [](int num_ranks, int num_experts, int num_topk, int hidden, int64_t num_max_tokens) {
            return GpuWorkspaceLayout({num_ranks, num_experts, num_topk, hidden, num_max_tokens}).total_bytes;
        },
        py::kw_only(), py::arg("num_ranks"), py::arg("num_experts"), py::arg("num_topk"), py::arg("hidden"), py::arg("num_max_tokens"));
    bind_low_latency_calls(m);
    bind_gpu_gate(m);
}

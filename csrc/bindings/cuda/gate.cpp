// Runs the GPU's gate for csrc/torch, and binds the functions around it and plans of copies. See deepep_moe/_C.pyi.
#include <array>
#include <atomic>
#include <stdexcept>
#include <string>

#include "bindings/tensor.h"
#include "cuda/launch.h"
#include "runtime/nvlink/guarded.h"

using namespace deepep_moe;

namespace {

// The kernels of a device report a non-finite number in this host memory, so that reading it waits for nothing.
struct alignas(64) FailureWord {
    unsigned long long value = 0;
};
constexpr int kMaxDevices = 128;

unsigned long long* failure_word(int device) {
    if (device < 0 || device >= kMaxDevices) throw std::invalid_argument("device is " + std::to_string(device) + "; it must be 0 to 127");
    static auto& words = *new_pinned<std::array<FailureWord, kMaxDevices>>();
    return &words[device].value;
}

unsigned long long failure(int device) { return std::atomic_ref(*failure_word(device)).load(std::memory_order_relaxed); }

// Raise why the thread's last launch failed, or what a kernel of the device has reported since the last check. A report written meanwhile
// stays for the next check.
void check(int device) {
    Guarded<GateOptions>::raise_failure();
    if (::failure(device) == 0) return;
    const unsigned long long failure = std::atomic_ref(*failure_word(device)).exchange(0, std::memory_order_relaxed);
    if (failure == 0) return;  // another thread has taken it
    const int what = static_cast<int>(failure >> kFailureWhatShift & 3);
    const bool is_bias = (failure >> kFailureWhatShift & static_cast<int>(GateFailure::kBias)) != 0;
    const std::string value = what == static_cast<int>(GateFailure::kNan)   ? "nan"
                              : what == static_cast<int>(GateFailure::kInf) ? "inf"
                                                                            : "-inf";
    const std::string token = "token " + std::to_string(failure >> kFailureTokenShift);
    const std::string expert = "expert " + std::to_string(failure & ((1u << kFailureWhatShift) - 1));
    throw std::invalid_argument(
        (is_bias ? "expert_bias has " + value + " for " + expert : "logits has " + value + " for " + token + ", " + expert) +
        " in an earlier call of the gate on the GPU (device " + std::to_string(device) +
        "), by this or another layer or model; it must be finite: such tokens chose no expert; look for an overflow before the router, or "
        "mask the token");
}

void check_options(const GateOptions& o, int num_ranks) {
    if (are_valid_on_gpu(o, num_ranks)) return;
    const auto str = [](int64_t value) { return std::to_string(value); };
    throw std::invalid_argument("gate options out of bounds: num_tokens " + str(o.num_tokens) + ", num_experts " + str(o.num_experts) +
                                ", num_topk " + str(o.num_topk) + ", num_groups " + str(o.num_groups) + ", topk_groups " +
                                str(o.topk_groups) + ", group_score_topk " + str(o.group_score_topk) + ", num_ranks " + str(num_ranks) +
                                "; at most " + str(kMaxGateExperts) + " experts");
}

// Makes `call` for csrc/torch, unless kernels have reported a failure. Returns false if something failed; `check` raises it.
template <class Call>
bool unless_failed(int device, const Call& call) noexcept {
    bool has_failed = false;
    return Guarded<GateOptions>::guarded([&] { failure(device) != 0 ? void(has_failed = true) : call(); }) && !has_failed;
}

// ---- top-2 gate of DeepSpeed ----

void top2(const TensorArg& gates, const TensorArg& scores, int64_t capacity, const TensorArg& chosen, const TensorArg& topk_idx,
          const TensorArg& topk_weights, const TensorArg& is_first, const TensorArg& counts, uintptr_t stream) {
    launch_top2({gates.num_rows, capacity, static_cast<int>(gates.num_columns), gates.as<const float*>(), scores.as<const float*>(),
                 chosen.as<int32_t*>(), topk_idx.as<int32_t*>(), topk_weights.as<float*>(), is_first.as<float*>(), counts.as<int64_t*>()},
                as_stream(stream));
}

void top2_backward(const TensorArg& gates, const TensorArg& chosen, const TensorArg& topk_idx, const TensorArg& grad,
                   const TensorArg& grad_loss, const TensorArg& load, const TensorArg& grad_gates, uintptr_t stream) {
    launch_top2_backward({gates.num_rows, static_cast<int>(gates.num_columns), gates.as<const float*>(), chosen.as<const int32_t*>(),
                          topk_idx.as<const int32_t*>(), grad.as<const float*>(), grad_loss.as<const float*>(), load.as<const float*>(),
                          grad_gates.as<float*>()},
                         as_stream(stream));
}

void plan(const TensorArg& topk_idx, const TensorArg& counts, const TensorArg& copies, const TensorArg& rows,
          const TensorArg& physical_topk_idx, int rank, int cost, int capacity, uintptr_t stream) {
    const CopyPlanParams params{
        .num_ranks = static_cast<int>(counts.num_rows),
        .num_experts = static_cast<int>(counts.num_columns),
        .num_slots = static_cast<int>(copies.num_columns),
        .rank = rank,
        .cost = cost,
        .capacity = capacity,
        .num_entries = topk_idx.num_rows * topk_idx.num_columns,
        .is_int64 = topk_idx.element_bytes == 8,
        .counts = counts.as<const int32_t*>(),
        .topk_idx = topk_idx.as<const void*>(),
        .copies = copies.as<int32_t*>(),
        .rows = rows.as<int32_t*>(),
        .physical_topk_idx = physical_topk_idx.as<void*>(),
    };
    launch_plan_copies(params, as_stream(stream));
}

void rows_of_copies(const TensorArg& rows, const TensorArg& of_copies, const TensorArg& group_ends, int num_home, bool is_back,
                    uintptr_t stream) {
    launch_rows_of_copies({rows.num_rows, rows.row_bytes(), group_ends.as<const int32_t*>(), num_home,
                           static_cast<int>(group_ends.num_rows), rows.as<std::byte*>(), of_copies.as<std::byte*>(), is_back},
                          as_stream(stream));
}

}  // namespace

bool gate_forward(GpuGateParams params, uintptr_t stream) noexcept {
    return unless_failed(params.device, [&] {
        params.failure = failure_word(params.device);
        check_options(params.options, params.num_ranks);
        launch_gate(params, as_stream(stream));
    });
}

bool gate_backward(const GpuGateBackwardParams& params, uintptr_t stream) noexcept {
    return unless_failed(params.device, [&] {
        check_options(params.options, 0);
        launch_gate_backward(params, as_stream(stream));
    });
}

bool may_capture(uintptr_t stream) noexcept {
    try {
        return is_capturing(as_stream(stream));
    } catch (const std::exception&) {  // CUDA gives no answer while another stream is captured
        return true;
    }
}

void bind_gpu_gate(py::module_& m) {
    m.attr("MAX_GPU_GATE_EXPERTS") = kMaxGateExperts;
    m.def("gpu_gate_check", &check);
    m.def("gpu_plan_copies", &plan);
    m.def("gpu_rows_of_copies", &rows_of_copies);
    m.def("gpu_top2", &top2);
    m.def("gpu_top2_backward", &top2_backward);
}

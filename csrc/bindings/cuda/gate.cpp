// Bindings of the GPU's gate: pointers, sizes and a stream in, nothing out. See deepep_moe/_C.pyi.
#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

#include "bindings/bindings.h"
#include "cuda/launch.h"
#include "runtime/nvlink/shim.h"
#include "runtime/nvlink/streams.h"

using namespace deepep_moe;

namespace {

template <typename T>
T* as(uintptr_t ptr) {
    return reinterpret_cast<T*>(ptr);
}

// Where kernels leave what was not finite: memory of the host that all devices see, so that looking at it waits for nothing.
unsigned long long* failure_word() {
    static unsigned long long* const word = [] {
        void* memory = nullptr;
        const cudaError_t status = cudaHostAlloc(&memory, sizeof(unsigned long long), cudaHostAllocMapped | cudaHostAllocPortable);
        if (status != cudaSuccess)
            throw std::runtime_error(std::string("no memory of the host for the gate: ") + cudaGetErrorString(status));
        return new (memory) unsigned long long(0);
    }();
    return word;
}

unsigned long long failure() { return *static_cast<volatile unsigned long long*>(failure_word()); }

// Raises what a kernel has found since the last look.
void check() {
    const unsigned long long failure = ::failure();
    if (failure == 0) return;
    *failure_word() = 0;
    const int what = static_cast<int>(failure >> kFailureWhatShift & 3);
    const bool is_bias = (failure >> kFailureWhatShift & static_cast<int>(GateFailure::kBias)) != 0;
    const std::string value = what == static_cast<int>(GateFailure::kNan)   ? "nan"
                              : what == static_cast<int>(GateFailure::kInf) ? "inf"
                                                                            : "-inf";
    const std::string token = "token " + std::to_string(failure >> kFailureTokenShift);
    const std::string expert = "expert " + std::to_string(failure & ((1u << kFailureWhatShift) - 1));
    throw std::invalid_argument((is_bias ? "expert_bias must be finite, got " + value + " for " + expert
                                         : "logits must be finite, got " + value + " for " + token + ", " + expert) +
                                " in an earlier call of the gate on the GPU, where such tokens choose no expert; look for an overflow "
                                "before the router, or mask the token");
}

void check_gpu_options(const GateOptions& o, int num_ranks) {
    check_gate_options(o);
    if (!are_valid_on_gpu(o, num_ranks)) {
        throw std::invalid_argument("gate options out of bounds: num_experts " + std::to_string(o.num_experts) + ", at most " +
                                    std::to_string(kMaxGateExperts) + " on a GPU; num_ranks " + std::to_string(num_ranks));
    }
}

void launch_forward(const GpuGateParams& params, uintptr_t stream) {
    check_gpu_options(params.gate.options, params.num_ranks);
    launch_gate(params, as<void>(stream));
}

void launch_backward(const GpuGateBackwardParams& params, uintptr_t stream) {
    check_gpu_options(params.gate.options, 0);
    launch_gate_backward(params, as<void>(stream));
}

// What csrc/torch calls. `call` is made where kernels have found nothing; a report stays for the call from Python.
template <class Call>
bool guarded(const Call& call) noexcept {
    try {
        if (failure() != 0) return false;
        call();
        return true;
    } catch (const std::exception&) {
        return false;
    }
}

constexpr GateShim kShim{
    [](GpuGateParams params, uintptr_t stream) noexcept {
        return guarded([&] {
            params.failure = failure_word();
            launch_forward(params, stream);
        });
    },
    [](const GpuGateBackwardParams& params, uintptr_t stream) noexcept { return guarded([&] { launch_backward(params, stream); }); },
    [](uintptr_t stream) noexcept {
        try {
            return is_capturing(as_stream(stream));
        } catch (const std::exception&) {  // CUDA does not say while another stream is captured
            return true;
        }
    },
};

void forward(const GateOptions& options, uintptr_t logits, uintptr_t expert_bias, uintptr_t mask, uintptr_t topk_idx,
             uintptr_t topk_weights, uintptr_t counts, uintptr_t next_counts, uintptr_t probs, uintptr_t routing_map, int num_ranks,
             uintptr_t is_token_in_rank, uintptr_t shares, uintptr_t stream) {
    check();
    const GateParams gate{options,
                          as<void>(logits),
                          as<float>(expert_bias),
                          as<bool>(mask),
                          as<void>(topk_idx),
                          as<float>(topk_weights),
                          as<int32_t>(counts),
                          as<float>(shares)};
    launch_forward(
        {gate, as<float>(probs), as<bool>(routing_map), num_ranks, as<bool>(is_token_in_rank), as<int32_t>(next_counts), failure_word()},
        stream);
}

void backward(const GateOptions& options, uintptr_t logits, uintptr_t topk_idx, uintptr_t grad_topk_weights, uintptr_t grad_probs,
              uintptr_t grad_shares, uintptr_t grad_logits, uintptr_t stream) {
    check();
    const GateBackwardParams gate{
        options, as<void>(logits), as<void>(topk_idx), as<float>(grad_topk_weights), as<float>(grad_shares), as<void>(grad_logits)};
    launch_backward({gate, as<float>(grad_probs)}, stream);
}

void update_expert_bias(int num_layers, int num_experts, uintptr_t num_tokens_per_expert, bool is_int64, uintptr_t expert_bias,
                        float update_rate, uintptr_t stream) {
    launch_update_expert_bias({num_layers, num_experts, is_int64, as<void>(num_tokens_per_expert), as<float>(expert_bias), update_rate},
                              as<void>(stream));
}

void bind_top2(py::module_& m) {
    py::class_<GpuTop2Params> params(m, "GpuTop2Params");
    params.def(
        py::init([](int64_t num_tokens, int num_experts, int64_t capacity) { return GpuTop2Params{num_tokens, capacity, num_experts}; }),
        py::arg("num_tokens"), py::arg("num_experts"), py::arg("capacity"));
    pointer_field(params, "gates", &GpuTop2Params::gates);
    pointer_field(params, "scores", &GpuTop2Params::scores);
    pointer_field(params, "chosen", &GpuTop2Params::chosen);
    pointer_field(params, "topk_idx", &GpuTop2Params::topk_idx);
    pointer_field(params, "topk_weights", &GpuTop2Params::topk_weights);
    pointer_field(params, "is_first", &GpuTop2Params::is_first);
    pointer_field(params, "counts", &GpuTop2Params::counts);
    py::class_<GpuTop2BackwardParams> backward(m, "GpuTop2BackwardParams");
    backward.def(py::init([](int64_t num_tokens, int num_experts) { return GpuTop2BackwardParams{num_tokens, num_experts}; }),
                 py::arg("num_tokens"), py::arg("num_experts"));
    pointer_field(backward, "gates", &GpuTop2BackwardParams::gates);
    pointer_field(backward, "chosen", &GpuTop2BackwardParams::chosen);
    pointer_field(backward, "topk_idx", &GpuTop2BackwardParams::topk_idx);
    pointer_field(backward, "grad", &GpuTop2BackwardParams::grad);
    pointer_field(backward, "grad_loss", &GpuTop2BackwardParams::grad_loss);
    pointer_field(backward, "load", &GpuTop2BackwardParams::load);
    pointer_field(backward, "grad_gates", &GpuTop2BackwardParams::grad_gates);
    m.def(
        "gpu_top2", [](const GpuTop2Params& p, uintptr_t stream) { launch_top2(p, as<void>(stream)); }, py::arg("params"),
        py::arg("stream"));
    m.def(
        "gpu_top2_backward", [](const GpuTop2BackwardParams& p, uintptr_t stream) { launch_top2_backward(p, as<void>(stream)); },
        py::arg("params"), py::arg("stream"));
}

}  // namespace

void bind_gpu_gate(py::module_& m) {
    m.attr("MAX_GPU_GATE_EXPERTS") = kMaxGateExperts;
    m.def("gpu_gate_forward", &forward, py::arg("options"), py::kw_only(), py::arg("logits"), py::arg("expert_bias"), py::arg("mask"),
          py::arg("topk_idx"), py::arg("topk_weights"), py::arg("counts"), py::arg("next_counts"), py::arg("probs"), py::arg("routing_map"),
          py::arg("num_ranks"), py::arg("is_token_in_rank"), py::arg("shares"), py::arg("stream"));
    m.def("gpu_gate_backward", &backward, py::arg("options"), py::kw_only(), py::arg("logits"), py::arg("topk_idx"),
          py::arg("grad_topk_weights"), py::arg("grad_probs"), py::arg("grad_shares"), py::arg("grad_logits"), py::arg("stream"));
    m.def("gpu_gate_check", &check);
    m.def("gpu_gate_shim", [] { return py::capsule(&kShim, kGateShimName); });
    bind_top2(m);
    m.def("gpu_update_expert_bias", &update_expert_bias, py::kw_only(), py::arg("num_layers"), py::arg("num_experts"),
          py::arg("num_tokens_per_expert"), py::arg("is_int64"), py::arg("expert_bias"), py::arg("update_rate"), py::arg("stream"));
}

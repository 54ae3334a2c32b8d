// Bindings of the CPU gate: pointers and sizes in, nothing out. See deepep_moe/_C.pyi.
#include "bindings/bindings.h"
#include "cpu/gate.h"

#include <stdexcept>
#include <string>
#include <string_view>

using namespace deepep_moe;

namespace {

ScoreFunction parse_score_function(std::string_view name) {
    if (name == "sigmoid") return ScoreFunction::kSigmoid;
    if (name == "sqrtsoftplus") return ScoreFunction::kSqrtSoftplus;
    if (name == "softmax") return ScoreFunction::kSoftmax;
    if (name == "softmax_topk") return ScoreFunction::kSoftmaxTopk;
    throw std::invalid_argument("score_function must be sigmoid, sqrtsoftplus, softmax or softmax_topk, got '" + std::string(name) + "'");
}

GateOptions make_options(int64_t num_tokens, int num_experts, int num_topk, int num_groups, int topk_groups, int group_score_topk,
                         std::string_view score_function, bool normalize, double routed_scaling_factor, DType dtype, bool index64,
                         int num_threads) {
    return {
        .num_tokens = num_tokens,
        .num_experts = num_experts,
        .num_topk = num_topk,
        .num_groups = num_groups,
        .topk_groups = topk_groups,
        .group_score_topk = group_score_topk,
        .score_function = parse_score_function(score_function),
        .normalize = normalize,
        .routed_scaling_factor = routed_scaling_factor,
        .dtype = dtype,
        .index64 = index64,
        .num_threads = num_threads,
    };
}

template <typename T>
T* as(uintptr_t ptr) {
    return reinterpret_cast<T*>(ptr);
}

void forward(const GateOptions& options, uintptr_t logits_ptr, uintptr_t expert_bias_ptr, uintptr_t mask_ptr, uintptr_t topk_idx_ptr,
             uintptr_t topk_weights_ptr, uintptr_t num_tokens_per_expert_ptr, uintptr_t shares_ptr) {
    const GateParams params{
        .options = options,
        .logits = as<void>(logits_ptr),
        .expert_bias = as<float>(expert_bias_ptr),
        .mask = as<bool>(mask_ptr),
        .topk_idx = as<void>(topk_idx_ptr),
        .topk_weights = as<float>(topk_weights_ptr),
        .num_tokens_per_expert = as<int32_t>(num_tokens_per_expert_ptr),
        .shares = as<float>(shares_ptr),
    };
    const py::gil_scoped_release release;
    gate_forward(params);
}

void backward(const GateOptions& options, uintptr_t logits_ptr, uintptr_t topk_idx_ptr, uintptr_t grad_topk_weights_ptr,
              uintptr_t grad_shares_ptr, uintptr_t grad_logits_ptr) {
    const GateBackwardParams params{
        .options = options,
        .logits = as<void>(logits_ptr),
        .topk_idx = as<void>(topk_idx_ptr),
        .grad_topk_weights = as<float>(grad_topk_weights_ptr),
        .grad_shares = as<float>(grad_shares_ptr),
        .grad_logits = as<void>(grad_logits_ptr),
    };
    const py::gil_scoped_release release;
    gate_backward(params);
}

}  // namespace

void bind_gate(py::module_& m) {
    py::class_<GateOptions>(m, "GateOptions", "Sizes and settings of the gate; csrc/cpu/gate.h explains them.")
        .def(py::init(&make_options), py::kw_only(), py::arg("num_tokens"), py::arg("num_experts"), py::arg("num_topk"),
             py::arg("num_groups"), py::arg("topk_groups"), py::arg("group_score_topk"), py::arg("score_function"), py::arg("normalize"),
             py::arg("routed_scaling_factor"), py::arg("dtype"), py::arg("index64"), py::arg("num_threads"));
    m.def("gate_forward", &forward, py::arg("options"), py::kw_only(), py::arg("logits_ptr"), py::arg("expert_bias_ptr"),
          py::arg("mask_ptr"), py::arg("topk_idx_ptr"), py::arg("topk_weights_ptr"), py::arg("num_tokens_per_expert_ptr"),
          py::arg("shares_ptr"));
    m.def("gate_backward", &backward, py::arg("options"), py::kw_only(), py::arg("logits_ptr"), py::arg("topk_idx_ptr"),
          py::arg("grad_topk_weights_ptr"), py::arg("grad_shares_ptr"), py::arg("grad_logits_ptr"));
}

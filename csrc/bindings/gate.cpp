// Bindings of the CPU gate: options and tensors in, nothing out. See deepep_moe/_C.pyi.
#include "bindings/tensor.h"
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
    throw std::invalid_argument("score_function is '" + std::string(name) + "'; it must be sigmoid, sqrtsoftplus, softmax or softmax_topk");
}

GateOptions make_options(int64_t num_tokens, int num_experts, int num_topk, int num_groups, int topk_groups, int group_score_topk,
                         std::string_view score_function, bool normalize, double routed_scaling_factor, DType dtype, bool index64,
                         int num_threads, bool check_finite) {
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
        .check_finite = check_finite,
    };
}

void forward(const GateOptions& options, const TensorArg& logits, const TensorArg& expert_bias, const TensorArg& mask,
             const TensorArg& topk_idx, const TensorArg& topk_weights, const TensorArg& num_tokens_per_expert, const TensorArg& shares) {
    gate_forward({
        .options = options,
        .logits = logits.as<const void*>(),
        .expert_bias = expert_bias.as<const float*>(),
        .mask = mask.as<const bool*>(),
        .topk_idx = topk_idx.as<void*>(),
        .topk_weights = topk_weights.as<float*>(),
        .num_tokens_per_expert = num_tokens_per_expert.as<int32_t*>(),
        .shares = shares.as<float*>(),
    });
}

void backward(const GateOptions& options, const TensorArg& logits, const TensorArg& topk_idx, const TensorArg& grad_topk_weights,
              const TensorArg& grad_shares, const TensorArg& grad_logits) {
    gate_backward({
        .options = options,
        .logits = logits.as<const void*>(),
        .topk_idx = topk_idx.as<const void*>(),
        .grad_topk_weights = grad_topk_weights.as<const float*>(),
        .grad_shares = grad_shares.as<const float*>(),
        .grad_logits = grad_logits.as<void*>(),
    });
}

}  // namespace

void bind_gate(py::module_& m) {
    py::class_<GateOptions>(m, "GateOptions", "Sizes and settings of the gate; csrc/cpu/gate.h explains them.")
        .def(py::init(&make_options), py::kw_only(), py::arg("num_tokens"), py::arg("num_experts"), py::arg("num_topk"),
             py::arg("num_groups"), py::arg("topk_groups"), py::arg("group_score_topk"), py::arg("score_function"), py::arg("normalize"),
             py::arg("routed_scaling_factor"), py::arg("dtype"), py::arg("index64"), py::arg("num_threads"),
             py::arg("check_finite") = true);
    const py::call_guard<py::gil_scoped_release> released;
    m.def("gate_forward", &forward, py::arg("options"), py::kw_only(), py::arg("logits"), py::arg("expert_bias"), py::arg("mask"),
          py::arg("topk_idx"), py::arg("topk_weights"), py::arg("num_tokens_per_expert"), py::arg("shares"), released);
    m.def("gate_backward", &backward, py::arg("options"), py::kw_only(), py::arg("logits"), py::arg("topk_idx"),
          py::arg("grad_topk_weights"), py::arg("grad_shares"), py::arg("grad_logits"), released);
}

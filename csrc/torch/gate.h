// Runs the gate from C++ for plain tensors on a GPU: checks, outputs, launch and gradient in one call of Python. It declines every other
// call by None, and Python makes that one.
#pragma once

#include "torch/streams.h"

namespace deepep_moe {

// The results of the gate, those that are wanted.
struct Gated {
    Tensor topk_idx, topk_weights, counts, probs, routing_map, is_token_in_rank, shares;  // counts: of experts, then of ranks
};

OptionalTensor run_gate_backward(const OptionalTensor& grad_topk_weights, const OptionalTensor& grad_probs,
                                 const OptionalTensor& grad_shares, const Tensor& logits, const Tensor& topk_idx, py::handle score_function,
                                 bool normalize, double routed_scaling_factor);

// Arguments in the order of `deepep_moe.ops.gate`, then those of `gate_full`. Returns `GateOutput`, or `FullGateOutput` where it `is_full`,
// or None where Python is to make the call. A call that Python has checked has no gradient and returns `Gated`, or None if a kernel has
// reported a value that is not finite.
py::object gate(py::handle logits, py::handle num_topk, py::handle num_groups, py::handle topk_groups, py::handle group_score_topk,
                py::handle score_function, py::handle expert_bias, py::handle normalize, py::handle routed_scaling_factor, py::handle mask,
                py::handle index_dtype, py::handle check_finite, py::handle dense, py::handle num_ranks, py::handle shares, bool is_full,
                bool is_checked);

}  // namespace deepep_moe

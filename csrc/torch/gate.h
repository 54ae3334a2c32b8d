// The gate from C++, for plain tensors on a GPU: checks, outputs, launch and gradient in one call of Python. It declines every other call
// by None, and Python makes that one.
#pragma once

#include "runtime/nvlink/shim.h"
#include "torch/tensors.h"

namespace deepep_moe {

// What Python gives, once. shim: `_C.gpu_gate_shim()`. current_stream(device index): its address. gradients: of a backward that C++
// declines, such as one that is to be differentiated.
void set_gate_hooks(const py::capsule& shim, py::object current_stream, py::object gradients);

// Arguments in the order of `deepep_moe.ops.gate`. Returns (topk_idx, topk_weights, num_tokens_per_expert).
py::object gate(py::handle logits, py::handle num_topk, py::handle num_groups, py::handle topk_groups, py::handle group_score_topk,
                py::handle score_function, py::handle expert_bias, py::handle normalize, py::handle routed_scaling_factor, py::handle mask,
                py::handle index_dtype, py::handle check_finite);
// Returns the fields of `FullGateOutput`.
py::object gate_full(py::handle logits, py::handle num_topk, py::handle num_groups, py::handle topk_groups, py::handle group_score_topk,
                     py::handle score_function, py::handle expert_bias, py::handle normalize, py::handle routed_scaling_factor,
                     py::handle mask, py::handle index_dtype, py::handle check_finite, py::handle dense, py::handle num_ranks,
                     py::handle shares);

}  // namespace deepep_moe

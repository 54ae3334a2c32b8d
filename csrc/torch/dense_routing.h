// Runs dense routing from C++ for plain tensors on a GPU without gradient: outputs and launch in one call of Python. It declines every
// other call by None, and Python makes that one with PyTorch's operators (deepep_moe/ops/lanes.py, which says what the functions do).
#pragma once

#include "torch/streams.h"

namespace deepep_moe {

// Returns topk_idx, and the values or None. With rows [num_tokens, ...] it also declines what is not a bool map, with floating-point
// values, of these tokens.
std::optional<std::pair<Tensor, OptionalTensor>> lanes_of_map(py::handle routing_map, py::handle values, int64_t num_topk, py::handle rows);
OptionalTensor dense_of_lanes(py::handle topk_idx, py::handle topk_values, int64_t num_experts);
// Returns the counts of ranks, then of experts, and is_token_in_rank.
std::optional<std::pair<Tensor, Tensor>> count_lanes(py::handle topk_idx, int64_t num_experts, int64_t num_ranks);

}  // namespace deepep_moe

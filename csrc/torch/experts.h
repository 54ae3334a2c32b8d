// Runs SwiGLU experts in grouped products from C++, with few steps of the host, for bf16 rows and counts on a GPU. It declines every other
// call by None, and Python makes that one (deepep_moe/ops/grouped_mlp.py), with the same bits.
#pragma once

#include "torch/streams.h"

namespace deepep_moe {

// Computes `deepep_moe.ops.grouped_mlp` without biases and with zero_tail=False. The arguments have the same names. main_grad1 and
// main_grad2 are its `main_grads`.
py::object grouped_swiglu(py::handle x, py::handle counts, py::handle w1, py::handle w2, py::handle probs, bool recompute_activation,
                          py::handle main_grad1, py::handle main_grad2);

}  // namespace deepep_moe

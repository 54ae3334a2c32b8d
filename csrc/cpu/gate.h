// The gate on the CPU.
#pragma once

#include "common/gate.h"

namespace deepep_moe {

// Throws std::invalid_argument for options out of bounds, a non-finite bias, or, with check_finite, a non-finite logit (naming token and
// expert).
void gate_forward(const GateParams& params);

// Throws std::invalid_argument for options out of bounds.
void gate_backward(const GateBackwardParams& params);

}  // namespace deepep_moe

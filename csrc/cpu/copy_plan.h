// Plans copies of hot experts on the CPU.
#pragma once

#include "common/copy_plan.h"

namespace deepep_moe {

// Throws std::invalid_argument for negative counts, or counts whose sum is 2^31 or more.
void plan_copies(const CopyPlanParams& params);

}  // namespace deepep_moe
